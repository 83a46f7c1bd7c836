"""gpt-oss's calls: messages to a function instead of an answer (github.com/openai/harmony)::

    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The recipient may stand before the channel as well. The reasoning before it is :mod:`serve_app.text.harmony`'s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from serve_app.text.tool_calls.base import CallPiece, ToolParser, Verdict
from serve_app.text.tool_calls.json_call import NamedCall

# What may stand in a header beside control tokens is short; a longer one is none.
LONGEST = 200
HEADER = re.compile(
    r"(?:<\|end\|>)?(?:<\|start\|>[^<]*|\s*to=[^<]*)?<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]{1,128})")
_CLOSED = re.compile(r"\s*(?:<\|(?:call|end)\|>\s*)+")
_BEGINNINGS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "to=")


def recipient(header: str) -> str | None:
    """The function that a header's message goes to."""
    found = _RECIPIENT.search(header)
    return found[1] if found is not None else None


def may_open(text: str) -> bool:
    """Whether ``text`` may become a header."""
    begun = text.lstrip()
    return len(text) <= LONGEST and any(each.startswith(begun) or begun.startswith(each) for each in _BEGINNINGS)


class Harmony(ToolParser):
    """Reads what stands behind the reasoning: calls, or an answer, which is text to its end."""

    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>")

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reader: NamedCall | None = None
        self._header = ""
        self._answers = False

    def _read(self, *, final: bool) -> list[str | CallPiece]:
        out: list[str | CallPiece] = []
        while self._held and (self._reader is not None or self._open(out, final)):
            assert self._reader is not None
            piece, taken, verdict = self._reader.read(self._held, final)
            self._held = self._held[taken:]
            if piece is not None and (piece.name or piece.arguments or piece.last):
                out.append(piece)
            if verdict is Verdict.MORE:
                break
            if verdict is Verdict.NO_CALL:
                self._held, self._answers = self._header + self._held, True
            else:
                self._calls += 1
            self._reader = None
        if final and self._reader is not None and self._reader.started:
            out += self.cut(self._reader)
            self._reader = None
        return out

    def _open(self, out: list[str | CallPiece], final: bool) -> bool:
        """Looks for a header; whether one was there."""
        if self._calls and (closed := _CLOSED.match(self._held)):
            self._held = self._held[closed.end() :]
        header = None if self._answers else HEADER.match(self._held)
        name = recipient(header[0]) if header is not None else None
        if header is not None and name is not None and (self._known is None or name in self._known):
            self._header, self._held = header[0], self._held[header.end() :]
            self._reader = NamedCall(self._calls, name)
            return True
        if header is None and not self._answers and not final and may_open(self._held):
            return False
        self._answers = self._answers or bool(self._held)
        if self._held:
            out.append(self._held)
            self._held = ""
        return False
