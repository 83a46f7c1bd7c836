"""A model's streamed answer, as `serve-app run` reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from serve_app.client.server import Server, ServerError

# Between two events; while a request waits, the server says each few seconds that it lives.
_SILENT_S = 600.0


@dataclass(slots=True)
class Answer:
    """What has come by now. ``first_s``, ``last_s``: seconds from the request to its first and last text."""

    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    first_s: float | None = None
    last_s: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None for a single one."""
        tokens = self.usage.get("completion_tokens", 0)
        if self.first_s is None or tokens < 2 or self.last_s <= self.first_s:
            return None
        return (tokens - 1) / (self.last_s - self.first_s)

    def figures(self) -> str:
        """A line for people: times, tokens and cost."""
        used, told = self.usage, []
        if used:
            cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            told.append(f"{used['prompt_tokens']} prompt tokens ({cached} cached)")
        if self.first_s is not None:
            told.append(f"first token after {self.first_s:.2f} s")
        if used:
            rate = self.tokens_per_second
            told.append(f"{used['completion_tokens']} tokens" + (f" at {rate:.1f}/s" if rate else ""))
        if used.get("neurons"):
            told.append(f"{used['neurons']:.4g} neurons")
        if cost := used.get("cost"):
            told.append(f"{cost['amount']} {cost['currency']}")
        return " · ".join(told)


@dataclass(slots=True, frozen=True)
class AnswerText:
    """Text that came: of the answer, or of the ``reasoning`` before it."""

    text: str
    reasoning: bool = False


def ask(
    server: Server,
    model: str,
    inputs: dict[str, Any],
    answer: Answer,
    waits: Callable[[str], None] = lambda why: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[AnswerText]:
    """The pieces of the model's answer to ``inputs``, as they come; ``answer`` is kept up to date. ``waits`` hears what
    it waits for. Closing the iterator ends the request. Raises :class:`ServerError`.
    """
    import httpx

    began = clock()
    more = {"json": {**inputs, "stream": True}, "timeout": httpx.Timeout(30.0, read=_SILENT_S)}
    with server.stream("POST", f"{server.ai}/run/{model}", **more) as events:
        if not events.headers.get("content-type", "").startswith("text/event-stream"):
            raise ServerError(
                "the model's answer is no text that comes in parts: name a file for its sound or picture with --out, "
                "or print the whole answer with --json",
                400,
            )
        for event in _events(events.iter_lines(), waits):
            if event.get("success") is False:
                raise ServerError(event["errors"][0]["message"], 500)
            answer.usage = event.get("usage") or answer.usage
            answer.finish = event.get("finish_reason") or answer.finish
            answer.tool_calls += event.get("tool_calls") or ()
            for piece in _pieces(event):
                answer.last_s = clock() - began
                if answer.first_s is None:
                    answer.first_s = answer.last_s
                if not piece.reasoning:
                    answer.text += piece.text
                yield piece


def _events(lines: Iterator[str], waits: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[len("data: ") :])
        elif line.startswith(": ") and (why := line[2:].strip()):
            waits(why)


def _pieces(event: dict[str, Any]) -> Iterator[AnswerText]:
    for choice in event.get("choices") or ():
        if thought := (choice.get("delta") or {}).get("reasoning_content"):
            yield AnswerText(thought, reasoning=True)
    if text := event.get("response"):
        yield AnswerText(text if isinstance(text, str) else json.dumps(text))
