"""What an adapter learns from: conversations or texts, a JSON object a line, as tokens with the part that is learnt."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.api.errors import ApiError
from serve_app.text.chat_template import TemplateFailed
from serve_app.text.prompt import render
from serve_app.text.tokenizer import Tokenizer

HELD_OUT_LEAST, HELD_OUT_MOST = 1, 200


class BadData(ValueError):
    """The file can't be used; the text says which line, and what is expected."""


@dataclass(slots=True)
class Sample:
    """Token ``ids``, and of which of them the loss counts: ``learnt`` [len(ids)] bool."""

    ids: list[int]
    learnt: list[bool]


@dataclass(slots=True)
class Data:
    """``left_out``: lines that were longer than allowed."""

    train: list[Sample]
    held_out: list[Sample]
    left_out: int = 0
    kinds: set[str] = field(default_factory=set)


def read_data(path: Path, folder: Path, eos: frozenset[int], *, longest: int, held_out: float, seed: int) -> Data:
    """Lines are ``{"messages": [...]}`` (with ``tools``, if need be), of which the assistant's turns are learnt, or
    ``{"text": "..."}``, of which everything is. ``held_out`` is a share. Raises :class:`BadData`.
    """
    try:
        tokenizer = Tokenizer(folder)
    except FileNotFoundError as error:
        raise BadData(f"{error}; the model needs its tokenizer to learn from text") from None
    samples: list[Sample] = []
    left_out, kinds = 0, set()
    for number, item in _lines(path):
        kind = "messages" if "messages" in item else "text"
        kinds.add(kind)
        try:
            sample = _chat(tokenizer, item, eos) if kind == "messages" else _text(tokenizer, item["text"], eos)
        except (ApiError, TemplateFailed, TypeError, KeyError, AttributeError) as error:
            raise BadData(f"{path}, line {number}: {error}") from None
        if len(sample.ids) > longest:
            left_out += 1
        elif any(sample.learnt[1:]):
            samples.append(sample)
    held = min(HELD_OUT_MOST, max(HELD_OUT_LEAST, round(len(samples) * held_out)))
    if len(samples) < 2 * held:
        raise BadData(
            f"{path}: {len(samples)} lines can be learnt from and {left_out} are longer than {longest} tokens; "
            f"give at least {2 * held}, or raise --max-tokens"
        )
    random.Random(seed).shuffle(samples)
    return Data(samples[held:], samples[:held], left_out, kinds)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path} can't be read ({error}); give a UTF-8 file with one JSON object a line") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise BadData(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(item, dict) or not (
            isinstance(item.get("messages"), list) or isinstance(item.get("text"), str)
        ):
            raise BadData(f'{path}, line {number} has neither "messages" (a list) nor "text" (a string)')
        yield number, item


def _text(tokenizer: Tokenizer, text: str, eos: frozenset[int]) -> Sample:
    ids = [*tokenizer.encode(text).tolist(), min(eos)] if eos else tokenizer.encode(text).tolist()
    return Sample(ids, [True] * len(ids))


def _chat(tokenizer: Tokenizer, item: dict[str, Any], eos: frozenset[int]) -> Sample:
    """The conversation as the model would have seen and written it: each answer behind the very prompt that serving
    renders. What a template leaves out of earlier turns (reasoning, say) keeps these from being learnt, not the last.
    """
    messages, tools = item["messages"], item.get("tools")
    ids: list[int] = []
    learnt: list[bool] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:turn], tools)
        after = render(tokenizer, messages[: turn + 1], tools, add_generation_prompt=False)
        if not after.startswith(before):
            raise TemplateFailed("the model's chat template does not write an answer behind its prompt")
        prompt = tokenizer.encode_prompt(before).tolist()
        answer = _answer(tokenizer, after[len(before) :], eos)
        if prompt[: len(ids)] != ids:
            ids, learnt = [], []
        learnt += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = [*prompt, *answer]
    if not ids:
        raise TemplateFailed("the conversation has no turn of the assistant")
    return Sample(ids, learnt)


def _answer(tokenizer: Tokenizer, text: str, eos: frozenset[int]) -> list[int]:
    """Up to the token that ends the turn: what a template writes behind it is never generated."""
    ids = tokenizer.encode_prompt(text).tolist()
    last = max((at for at, token in enumerate(ids) if token in eos), default=None)
    return ids if last is None else ids[: last + 1]


class Batches:
    """Batches of at most ``tokens`` tokens, padding included. Step ``n``'s depends on the seed and ``n`` alone, so that
    a resumed run sees what an uninterrupted one would have seen.
    """

    def __init__(self, samples: list[Sample], tokens: int, seed: int) -> None:
        self._batches = list(cut(samples, tokens))
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        return len(self._batches)

    def step(self, number: int) -> list[Sample]:
        """Every epoch has the same batches, in an order of its own."""
        epoch, at = divmod(number, self.per_epoch)
        order = np.random.default_rng((self._seed, epoch)).permutation(self.per_epoch)
        return self._batches[int(order[at])]


def cut(samples: list[Sample], tokens: int) -> Iterator[list[Sample]]:
    """Samples of similar length together."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda each: len(each.ids)):
        if batch and (len(batch) + 1) * len(sample.ids) > tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
