"""Every answer that a benchmark gets is checked: one that is wrong ends it with an error, before any figure is printed.

A *problem* is None for a right answer, and otherwise says in a few words what is wrong with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SHOWN = 5  # kinds of problems that are listed
EXCERPT = 160  # characters of a wrong answer


@dataclass(slots=True)
class Checks:
    """How many answers were right, and how often each problem came up."""

    right: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, problem: str | None) -> bool:
        """Counts one answer; returns whether it was right."""
        if problem is None:
            self.right += 1
        else:
            self.wrong[f"{where}: {problem}"] += 1
        return problem is None

    def that(self, where: str, holds: bool, problem: str) -> bool:
        return self.add(where, None if holds else problem)

    def equal(self, where: str, got: Any, wanted: Any) -> bool:
        return self.add(where, None if got == wanted else f"{_excerpt(got)} instead of {_excerpt(wanted)}")

    def require(self) -> int:
        """How many answers were right. Raises :class:`SystemExit` with what is wrong, or if nothing was checked."""
        if not self.wrong and self.right:
            return self.right
        count = self.wrong.total()
        said = [f"no figures: {count} of {count + self.right} answers are wrong"]
        said += [f"  {times} x {problem}" for problem, times in self.wrong.most_common(SHOWN)]
        if len(self.wrong) > SHOWN:
            said.append(f"  and {len(self.wrong) - SHOWN} other kinds")
        raise SystemExit("\n".join(said) if count else "no figures: no answer came")


def chat_problem(status: int, body: bytes, *, text: str | None = None, tokens: int | None = None) -> str | None:
    """Of a chat completion in OpenAI's form; ``text`` and ``tokens`` where they are known."""
    if status != 200:
        return _refused(status, body)
    try:
        answer = json.loads(body)
        [choice] = answer["choices"]
        got = choice["message"]["content"]
    except (ValueError, KeyError, TypeError):
        return f"no chat completion: {_excerpt(body)}"
    return _said(got, text, answer.get("usage"), tokens)


def stream_problem(status: int, body: bytes, *, text: str | None = None, tokens: int | None = None) -> str | None:
    """Of a streamed one, with everything up to the end of its body."""
    if status != 200:
        return _refused(status, body)
    parts, usage = [], None
    try:
        *events, done = sse_data(body)
        for event in map(json.loads, events):
            if "error" in event:
                return f"the stream failed: {_excerpt(event['error'])}"
            parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
            usage = event.get("usage") or usage
    except (ValueError, KeyError, TypeError):
        return f"no stream of a chat completion: {_excerpt(body)}"
    if done != b"[DONE]":
        return f"the stream is not complete: it ends with {_excerpt(done)}"
    return _said("".join(parts), text, usage, tokens)


def sse_data(body: bytes) -> list[bytes]:
    """The data of each server-sent event; comments are left out."""
    return [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]


def first_problem(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _said(got: Any, text: str | None, usage: dict[str, Any] | None, tokens: int | None) -> str | None:
    if not isinstance(got, str) or not got:
        return f"no text: {_excerpt(got)}"
    if text is not None and got != text:
        return f"the text is {_excerpt(got)} instead of {_excerpt(text)}"
    if tokens is not None and usage is not None and usage["completion_tokens"] != tokens:
        return f"{usage['completion_tokens']} tokens instead of {tokens}"
    return None


def _refused(status: int, body: bytes) -> str:
    return f"status {status} instead of 200: {_excerpt(body)}"


def _excerpt(value: Any) -> str:
    shown = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return repr(shown if len(shown) <= EXCERPT else shown[:EXCERPT] + "...")
