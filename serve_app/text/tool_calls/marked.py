"""Formats in which a marker announces a call: Hermes (Qwen, pico) and Mistral."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from serve_app.text.tool_calls.base import CallParser, CallPiece, ToolParser, Verdict, prefix_at_end
from serve_app.text.tool_calls.json_call import NamedCall, ObjectCall
from serve_app.text.tool_calls.json_scanner import in_string
from serve_app.text.tool_calls.xml_call import OPEN as XML_OPEN
from serve_app.text.tool_calls.xml_call import XmlCall


class Marked(ToolParser):
    """White space around calls belongs to nobody and is dropped."""

    marker: str
    close: str  # the mark behind a call, of formats that have one

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reader: CallParser | None = None
        # Characters between the marker and what the reader reads.
        self._lead = 0
        self._closing = False
        self._after_call = False

    def _open(self, body: str, final: bool) -> tuple[CallParser | None, int, Verdict]:
        """The reader of what stands behind a marker, and how many characters come before its part. Without a reader:
        whether there may be one yet, or how many characters are text."""
        raise NotImplementedError

    def _hopeless(self, body: str) -> int:
        """How many characters of ``body`` are text because no call can come of them any more; 0 while one can."""
        return 0

    def _close(self, final: bool) -> bool:
        """Reads what stands behind a call, by itself a mark. False where more text is needed to tell."""
        rest = self._held.lstrip()
        if rest.startswith(self.close):
            self._held = rest[len(self.close) :]
        elif self.close.startswith(rest) and not final:
            return False
        # Models often stop without it.
        self._closing = False
        return True

    def _read(self, *, final: bool) -> list[str | CallPiece]:
        out: list[str | CallPiece] = []
        while self._held:
            if self._closing:
                going = self._close(final)
            elif self._reader is not None and self._reader.started:
                going = self._take(out, self._reader, 0, final)
            else:
                going = self._look(out, final)
            if not going:
                break
        if final and self._reader is not None and self._reader.started:
            out += self.cut(self._reader)
            self._reader = None
        return out

    def _look(self, out: list[str | CallPiece], final: bool) -> bool:
        start = self._held.find(self.marker)
        if start < 0:
            keep = 0 if final else prefix_at_end(self._held, self.marker)
            certain = self._held[: len(self._held) - keep]
            self._text(out, certain if final else certain.rstrip(), final)
            return False
        inside = start + len(self.marker)
        body = self._held[inside:]
        if self._reader is None:
            self._reader, taken, verdict = self._open(body, final)
            self._lead = taken
        if self._reader is not None:
            return self._take(out, self._reader, inside + self._lead, final)
        return self._undecided(out, start, inside + taken if verdict is Verdict.NO_CALL else 0)

    def _take(self, out: list[str | CallPiece], reader: CallParser, at: int, final: bool) -> bool:
        """Lets ``reader`` read what is held from ``at`` on."""
        opened = reader.started
        piece, taken, verdict = reader.read(self._held[at:], final)
        if not reader.started:
            start = self._held.find(self.marker)
            inside = start + len(self.marker)
            given_up = at + taken if verdict is Verdict.NO_CALL else 0
            if not given_up and (hopeless := self._hopeless(self._held[inside:])):
                given_up = inside + hopeless
            return self._undecided(out, start, given_up)
        if not opened:
            before = self._held[: self._held.find(self.marker)].rstrip()
            self._text(out, before, False)
            at -= len(before)
            self._after_call = True
        self._held = self._held[at + taken :]
        if piece is not None and (piece.name or piece.arguments or piece.last):
            out.append(piece)
        if verdict is Verdict.DONE:
            self._reader = None
            self._calls += 1
            self._closing = True
            return True
        return False

    def _undecided(self, out: list[str | CallPiece], start: int, given_up: int) -> bool:
        """``given_up`` characters are no call and so text like any other; 0 while nobody can tell."""
        if given_up:
            self._reader = None
            self._text(out, self._held[:given_up], True)
            return True
        self._text(out, self._held[:start].rstrip(), False)
        return False

    def _text(self, out: list[str | CallPiece], text: str, final: bool) -> None:
        """Moves ``text``, the beginning of what is held, to ``out``."""
        self._held = self._held[len(text) :]
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        if text:
            out.append(text)


class Hermes(Marked):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; Qwen3-Coder's tags between the same markers."""

    marker = "<tool_call>"
    close = "</tool_call>"
    markers = (marker, close)

    def _open(self, body: str, final: bool) -> tuple[CallParser | None, int, Verdict]:
        stripped = body.lstrip()
        lead = len(body) - len(stripped)
        if stripped.startswith("{"):
            return ObjectCall(self._calls, stop=self.close, known=self._known), lead, Verdict.MORE
        if stripped.startswith(XML_OPEN):
            return XmlCall(self._calls, self._tools, stop=self.close), lead, Verdict.MORE
        undecided = not final and XML_OPEN.startswith(stripped)
        return None, 0, Verdict.MORE if undecided else Verdict.NO_CALL

    def _hopeless(self, body: str) -> int:
        # A closing tag outside a string means that the JSON is broken for good; inside one it is an argument.
        at = body.find(self.close)
        while at >= 0 and in_string(body[:at]):
            at = body.find(self.close, at + 1)
        return at + len(self.close) if at >= 0 else 0


class Mistral(Marked):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` with or without
    ``[CALL_ID]`` before the arguments."""

    marker = "[TOOL_CALLS]"
    markers = (marker, "[ARGS]", "[CALL_ID]")
    _name = re.compile(r"\s*([\w.:/-]{1,128})\s*(?:\[CALL_ID\][\w-]{0,64})?\[ARGS\]")
    # Longer than that no name and id can be together.
    _longest = 256

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._in_list = False

    def _open(self, body: str, final: bool) -> tuple[CallParser | None, int, Verdict]:
        undecided = Verdict.NO_CALL if final else Verdict.MORE
        stripped = body.lstrip()
        if not stripped:
            return None, 0, undecided
        if stripped.startswith("["):
            inner = stripped[1:].lstrip()
            if not inner:
                return None, 0, undecided
            self._in_list = inner.startswith("{")
            lead = len(body) - len(inner)
            reader = ObjectCall(self._calls, known=self._known) if self._in_list else None
            return (reader, lead, Verdict.MORE) if reader is not None else (None, 0, Verdict.NO_CALL)
        named = self._name.match(body)
        if named is not None and self._known is not None and named[1] not in self._known:
            return None, 0, Verdict.NO_CALL
        if named is not None:
            return NamedCall(self._calls, named[1]), named.end(), Verdict.MORE
        possible = "[ARGS]" not in body and len(body) < self._longest
        return None, 0, undecided if possible else Verdict.NO_CALL

    def _close(self, final: bool) -> bool:
        self._closing = self._in_list
        if not self._in_list:
            return True
        rest = self._held.lstrip()
        if rest.startswith("]"):
            self._closing = self._in_list = False
            self._held = rest[1:]
            return True
        after = rest[1:].lstrip() if rest.startswith(",") else ""
        if not final and not (after or rest.strip(", \n\t\r")):
            return False
        self._closing = False
        if after.startswith("{"):
            # The next of the list: as if the marker stood before it again.
            self._held = f"{self.marker}[{after}"
        else:
            self._in_list = False
        return True
