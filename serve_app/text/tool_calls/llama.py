"""Llama 3 and 4: an answer is calls or it is text, decided by how it begins.

``{"name": ..., "parameters": {...}}``, several split by ";"     Llama 3.1 and later
``[add(a=1, b="x"), now()]``                                     Llama 3.2 and 4, "pythonic"

Either may follow ``<|python_tag|>``. Formats: Meta's prompt format pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.text.tool_calls.base import CallParser, CallPiece, ToolParser, Verdict
from serve_app.text.tool_calls.json_call import ObjectCall
from serve_app.text.tool_calls.pythonic_call import PythonicCall

_SEPARATORS = "; \r\n\t"


class Llama(ToolParser):
    """No marker says that a call begins: the whole answer has to look like one."""

    tag = "<|python_tag|>"
    markers = (tag,)

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reader: CallParser | None = None
        self._in_list = False
        # What comes now is text, whatever it looks like; and some of it was told.
        self._plain = False
        self._told = False

    def _read(self, *, final: bool) -> list[str | CallPiece]:
        out: list[str | CallPiece] = []
        while self._held and not self._plain:
            if not (self._between_calls() if self._in_list and not self._reader else self._step(out, final)):
                break
        if final and self._reader is not None and self._reader.started:
            out += self.cut(self._reader)
            self._reader = None
        if self._plain or final:
            # Separators belong to the calls before them; what follows is told as it is.
            rest = self._held.lstrip(_SEPARATORS) if self._calls and not self._told else self._held
            self._held = ""
            if rest:
                out.append(rest)
                self._told = True
        return out

    def _between_calls(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(","):
            self._held = rest[1:]
            self._reader = PythonicCall(self._calls, self._known)
        elif rest.startswith("]"):
            self._held = rest[1:]
            self._in_list = False
        elif rest:
            self._plain = True
        return bool(rest) and not self._plain

    def _step(self, out: list[str | CallPiece], final: bool) -> bool:
        """Reads on in a call; False where more text is needed or none can come."""
        at = 0
        if not self._in_list and not (self._reader and self._reader.started):
            body = self._held.lstrip(_SEPARATORS) if self._calls else self._held.lstrip()
            inner = body.removeprefix(self.tag).lstrip()
            if not inner or (self.tag.startswith(body) and not final):
                return False
            at = len(self._held) - len(inner)
            if inner.startswith("["):
                at += 1
                self._reader = self._reader or PythonicCall(self._calls, self._known)
            elif inner.startswith("{"):
                self._reader = self._reader or ObjectCall(self._calls, known=self._known)
            else:
                self._plain = True
                return False
        assert self._reader is not None
        return self._take(out, self._reader, at, final)

    def _take(self, out: list[str | CallPiece], reader: CallParser, at: int, final: bool) -> bool:
        piece, taken, verdict = reader.read(self._held[at:], final)
        self._plain = verdict is Verdict.NO_CALL
        if not reader.started:
            return False
        self._held = self._held[at + taken :]
        self._in_list = isinstance(reader, PythonicCall)
        if piece is not None and (piece.name or piece.arguments or piece.last):
            out.append(piece)
        if verdict is Verdict.DONE:
            self._reader = None
            self._calls += 1
        return verdict is Verdict.DONE
