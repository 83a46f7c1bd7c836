"""Decisions: questions of three kinds about one state, answered with probabilities and without a text.

The wire is that of Cloudflare's decision models: ``{state, questions: {name: {type, instructions, criteria}}}`` in,
``{model, answers: {name: {type, ...}}, usage}`` out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.lora import parse_lora
from serve_app.api.fields.values import boolean, refuse
from serve_app.api.types import AdapterRef, ModelLimits, TaskRequest, Usage
from serve_app.api.workers_ai.read import open_native

Kind = Literal["noul", "choice", "score"]
# As clients name them.
KINDS: Mapping[str, Kind] = {"noul": "noul", "boolean": "noul", "choice": "choice", "score": "score"}
MAX_QUESTIONS = 64
# Of one text, and of all questions together.
MAX_CHARS = 20_000
MAX_ALL_CHARS = 1_000_000
# One letter each, and one digit each: a label is one token in every vocabulary.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
MEDIA = ("images", "audio", "videos")


@dataclass(slots=True, frozen=True)
class Option:
    """``key``: what the client calls it; ``label``: what the model would answer with; ``about``: what it means."""

    key: str
    label: str
    about: str = ""


@dataclass(slots=True, frozen=True)
class Question:
    """``type``: the kind, as the client named it. Options of a noul are yes and no; of a score its levels, the lowest
    first.
    """

    name: str
    type: str
    instructions: str
    options: tuple[Option, ...]

    @property
    def kind(self) -> Kind:
        return KINDS[self.type]


@dataclass(slots=True)
class DecideRequest(TaskRequest):
    """``calibrate``: what the model would say of no state at all is taken out of its answers. ``lora`` and ``adapter``
    as in :class:`~serve_app.api.types.GenerateRequest`.
    """

    model: str
    state: str
    questions: tuple[Question, ...]
    calibrate: bool = False
    lora: str = ""
    adapter: AdapterRef | None = None


@dataclass(slots=True, frozen=True)
class Decisions:
    """``scores``: of each question, the natural logarithms of how likely each option's label is to come next; and
    ``blank`` of them where nothing was to be read, empty if not asked for.
    """

    scores: tuple[tuple[float, ...], ...]
    blank: tuple[tuple[float, ...], ...]
    usage: Usage


def parse_decide(body: dict[str, Any], model: str, limits: ModelLimits | None = None) -> DecideRequest:
    """Raises `InvalidInput`."""
    body, asked = open_native(body)
    for name in MEDIA:
        if body.get(name):
            raise InvalidInput(f"{name}: decisions are about text here; leave {name} out.", param=name)
    state = body.get("state")
    if state is None or state == "":
        raise InvalidInput(
            "Input does not match the model's schema: required: state (a text, or JSON, that is asked about).",
            param="state",
        )
    found = body.get("questions")
    if not isinstance(found, dict):
        raise refuse("questions", "an object of questions by their names", found)
    if not 1 <= len(found) <= MAX_QUESTIONS:
        raise InvalidInput(f"questions must hold 1 to {MAX_QUESTIONS}, got {len(found)}.", param="questions")
    questions = tuple(_question(name, value) for name, value in found.items())
    chars = sum(len(one.instructions) + sum(len(o.key) + len(o.about) for o in one.options) for one in questions)
    if chars > MAX_ALL_CHARS:
        raise InvalidInput(
            f"questions have {chars} characters together; at most {MAX_ALL_CHARS} are taken. Ask in several requests.",
            param="questions",
        )
    calibrate = boolean(body, "calibrate") or False
    return DecideRequest(model, _text(state), questions, calibrate, parse_lora(body, model, limits), **asked)


def _question(name: str, value: Any) -> Question:
    where = f"questions.{name[:64]}"
    if not isinstance(value, dict):
        raise refuse(where, "an object with type, instructions and criteria", value)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidInput(f"{where}.type must be one of {', '.join(KINDS)}.", param=f"{where}.type")
    instructions = _text(value.get("instructions"))
    if len(instructions) > MAX_CHARS:
        raise InvalidInput(
            f"{where}.instructions must have at most {MAX_CHARS} characters, got {len(instructions)}; what all "
            "questions are about belongs into state.",
            param=f"{where}.instructions",
        )
    options = _OPTIONS[KINDS[kind]](where, value.get("criteria"))
    if not instructions and not any(option.about for option in options):
        raise InvalidInput(
            f"{where} asks nothing: required: instructions (a text), or criteria that say enough.", param=where
        )
    return Question(name, kind, instructions, options)


def _noul(where: str, criteria: Any) -> tuple[Option, ...]:
    if criteria is None:
        criteria = {}
    elif isinstance(criteria, str):
        criteria = {"true": criteria}
    if not isinstance(criteria, dict) or not set(criteria) <= {"true", "false"}:
        raise refuse(f"{where}.criteria", "an object with what true and false mean", criteria)
    return Option("true", "Yes", _about(where, criteria.get("true"))), Option(
        "false", "No", _about(where, criteria.get("false"))
    )


def _choice(where: str, criteria: Any) -> tuple[Option, ...]:
    if isinstance(criteria, list) and all(isinstance(key, str) for key in criteria):
        criteria = dict.fromkeys(criteria)
    if not isinstance(criteria, dict):
        raise refuse(f"{where}.criteria", "an object of options and what they mean", criteria)
    if not 2 <= len(criteria) <= len(LETTERS):
        raise InvalidInput(
            f"{where}.criteria must have 2 to {len(LETTERS)} options, got {len(criteria)}.", param=f"{where}.criteria"
        )
    pairs = zip(LETTERS, criteria.items(), strict=False)
    return tuple(Option(key, letter, _about(where, about)) for letter, (key, about) in pairs)


def _score(where: str, criteria: Any) -> tuple[Option, ...]:
    if not isinstance(criteria, list):
        raise refuse(f"{where}.criteria", "a list of levels, the lowest first", criteria)
    if not 2 <= len(criteria) <= len(DIGITS):
        raise InvalidInput(
            f"{where}.criteria must have 2 to {len(DIGITS)} levels, got {len(criteria)}.", param=f"{where}.criteria"
        )
    return tuple(Option(digit, digit, _about(where, about)) for digit, about in zip(DIGITS, criteria, strict=False))


_OPTIONS = {"noul": _noul, "choice": _choice, "score": _score}


def _about(where: str, value: Any) -> str:
    found = _text(value)
    if len(found) > MAX_CHARS:
        raise InvalidInput(f"{where}.criteria: a text may have {MAX_CHARS} characters.", param=f"{where}.criteria")
    return found


def _text(value: Any) -> str:
    """A text as it is; other JSON as JSON."""
    if value is None:
        return ""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except TypeError:
        raise refuse("state, instructions and criteria", "a text or JSON", value) from None


def answers(request: DecideRequest, found: Decisions) -> dict[str, Any]:
    """The answers by name. ``mass``: how much of the model's probability the options had before they shared all of it;
    where that is little, it would have said something else.
    """
    blanks = found.blank or (None,) * len(found.scores)
    told = {}
    for question, scores, blank in zip(request.questions, found.scores, blanks, strict=True):
        shares = _shares(scores if blank is None else [a - b for a, b in zip(scores, blank, strict=True)])
        mass = min(1.0, sum(map(math.exp, scores)))
        told[question.name] = {"type": question.type, **_SHOWN[question.kind](question, shares), "mass": mass}
    return told


def _shares(scores: Sequence[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _confidence(shares: Sequence[float]) -> float:
    """1 where one option has all, 0 where all have the same: what is left of the entropy that there could be."""
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return max(0.0, 1.0 - entropy / math.log(len(shares)))


def _shown_noul(question: Question, shares: Sequence[float]) -> dict[str, Any]:
    return {"noul": shares[0]}


def _shown_choice(question: Question, shares: Sequence[float]) -> dict[str, Any]:
    named = {option.key: share for option, share in zip(question.options, shares, strict=True)}
    return {"choice": max(named, key=named.__getitem__), "probabilities": named, "confidence": _confidence(shares)}


def _shown_score(question: Question, shares: Sequence[float]) -> dict[str, Any]:
    return {
        "score": sum(level * share for level, share in enumerate(shares)),
        "probabilities": {option.key: share for option, share in zip(question.options, shares, strict=True)},
        "legend": {option.key: option.about for option in question.options},
        "confidence": _confidence(shares),
    }


_SHOWN = {"noul": _shown_noul, "choice": _shown_choice, "score": _shown_score}
