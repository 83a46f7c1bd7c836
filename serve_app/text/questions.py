"""Questions about a state as token ids: a beginning that all share, and what comes behind it for each.

The whole is one message of a user, in the model's own chat template. State and question are tokenised apart, so that
the shared part is the same for every question, and for every call about that state.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serve_app.api.decisions import Option, Question
from serve_app.api.errors import InvalidInput
from serve_app.text.prompt import render
from serve_app.text.tokenizer import Tokenizer

# What is asked about where nothing is to be read (Zhao et al. 2021, "Calibrate before use").
NOTHING = "N/A"
Ids = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class QuestionPrompts:
    """``shared``: int32 token ids; ``branches``: of each question what follows. ``labels``: of each question and each
    of its options, the tokens that an answer with it could begin with.
    """

    shared: Ids
    branches: tuple[Ids, ...]
    labels: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def tokens(self) -> int:
        return len(self.shared) + sum(map(len, self.branches))

    @property
    def longest(self) -> int:
        return len(self.shared) + max(map(len, self.branches))


def question_prompts(tokenizer: Tokenizer, state: str, questions: Sequence[Question]) -> QuestionPrompts:
    """Raises `InvalidInput` where the model's tokens do not tell two labels apart."""
    head, tail = _around(tokenizer, state)
    shared = tokenizer.encode_prompt(head, add_special_tokens=tokenizer.chat_template() is None)
    safe = tokenizer.control.neutralise
    branches = tuple(tokenizer.encode_prompt(f"\n\n{safe(asking(question))}{tail}") for question in questions)
    known: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
    labels = []
    for question in questions:
        names = tuple(option.label for option in question.options)
        if names not in known:
            known[names] = _beginnings(tokenizer, tail, names)
        labels.append(known[names])
    return QuestionPrompts(shared, branches, tuple(labels))


def asking(question: Question) -> str:
    """The question as the model reads it."""
    lines = [question.instructions] if question.instructions else []
    if question.kind == "noul":
        lines += [_line(option) for option in question.options if option.about]
        return "\n".join([*lines, "Answer Yes or No."])
    lines += [_line(option) for option in question.options]
    return "\n".join([*lines, "Answer with the letter." if question.kind == "choice" else "Answer with the number."])


def _line(option: Option) -> str:
    named = "" if option.key in (option.label, "true", "false") else option.key
    return f"{option.label}: {' - '.join(part for part in (named, option.about) if part)}"


def _around(tokenizer: Tokenizer, state: str) -> tuple[str, str]:
    """The prompt up to the end of the state, and from the end of the message to where the answer begins."""
    if tokenizer.chat_template() is None:
        return tokenizer.control.neutralise(state), "\nAnswer:"
    mark = secrets.token_hex(16)
    # Models that reason are asked not to: what counts is the first token of the answer.
    text = render(tokenizer, [{"role": "user", "content": state + mark}], enable_thinking=False)
    head, _, tail = text.rpartition(mark)
    return head, tail


def _beginnings(tokenizer: Tokenizer, before: str, labels: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Of each label the first tokens that it may have behind ``before``, with a space and without."""
    start = tokenizer.encode_prompt(before)

    def first(text: str) -> int:
        whole = tokenizer.encode_prompt(before + text)
        if len(whole) > len(start) and np.array_equal(whole[: len(start)], start):
            return int(whole[len(start)])
        return int(tokenizer.encode_prompt(text)[0])

    found = [tuple(dict.fromkeys((first(label), first(f" {label}")))) for label in labels]
    every = [token for tokens in found for token in tokens]
    told = tuple(tuple(token for token in tokens if every.count(token) == 1) for tokens in found)
    if not all(told):
        raise InvalidInput("This model's tokens do not tell the options apart; ask another model.", param="questions")
    return told
