"""gpt-oss's calls: messages to a function instead of an answer (github.com/openai/harmony)::

    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The recipient may stand before the channel as well. The reasoning before it is :mod:`serve_app.text.harmony`'s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from serve_app.text.tool_calls.base import CallPiece, Growing, ToolParser, Verdict, prefix_at_end
from serve_app.text.tool_calls.json_call import NamedCall

# What may stand in a header beside control tokens is short; a longer one is none.
LONGEST = 300
HEADER = re.compile(
    r"(?:<\|end\|>)?(?:<\|start\|>[^<]*|\s*to=[^<]*)?<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_RECIPIENT = re.compile(r"\bto=functions\.([\w.:/-]{1,128})")
_BEGINNINGS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "to=")
_FINAL = "final"


def recipient(header: str) -> str | None:
    """The function that a header's message goes to."""
    found = _RECIPIENT.search(header)
    return found[1] if found is not None else None


def may_open(text: str) -> bool:
    """Whether ``text`` may become a header."""
    begun = text.lstrip()
    return len(text) <= LONGEST and any(each.startswith(begun) or begun.startswith(each) for each in _BEGINNINGS)


class Harmony(ToolParser):
    """Reads what stands behind the reasoning, message by message: a call, an answer, which is text, or another, which
    is nobody's business. Control tokens are no text.
    """

    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>")

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reader: NamedCall | None = None
        self._name = ""
        self._shown = True  # whether the message is the answer
        self._begun = False

    def _read(self, *, final: bool) -> list[str | CallPiece]:
        out: list[str | CallPiece] = []
        going = True
        while going and (self._held or (final and self._reader is not None)):
            going = self._call(out, final) if self._reader is not None else self._message(out, final)
        return out

    def _call(self, out: list[str | CallPiece], final: bool) -> bool:
        """Reads on in a call. False where more text is needed."""
        assert self._reader is not None
        if not self._reader.started and not final and self._held.strip() == "<":
            return False
        if not self._reader.started and (self._held.lstrip().startswith("<|") or (final and not self._held.strip())):
            out.append(Growing(self._calls).piece(self._name, "{}", last=True))  # without arguments
            verdict = Verdict.DONE
        else:
            piece, taken, verdict = self._reader.read(self._held, final)
            self._held = self._held[taken:]
            if piece is not None and (piece.name or piece.arguments or piece.last):
                out.append(piece)
        if verdict is Verdict.MORE:
            if final:
                out += self.cut(self._reader)
                self._reader = None
            return False
        self._calls += verdict is Verdict.DONE
        self._shown = verdict is Verdict.NO_CALL  # what is no JSON is what the model says
        self._reader = None
        return True

    def _message(self, out: list[str | CallPiece], final: bool) -> bool:
        """Reads text up to the next control token, or the header that it begins. False where more text is needed."""
        if not self._begun and self._held.lstrip().startswith("to="):
            at = 0
        elif not self._begun and not final and "to=".startswith(self._held.lstrip()):
            return False
        else:
            found = [at for mark in self.markers if (at := self._held.find(mark)) >= 0]
            keep = 0 if final else max(prefix_at_end(self._held, mark) for mark in self.markers)
            at = min(found, default=len(self._held) - keep)
        if at:
            self._begun = True
            text, self._held = self._held[:at], self._held[at:]
            if self._shown:
                out.append(text)
            return True
        header = HEADER.match(self._held, 0, LONGEST)
        if header is None and not final and may_open(self._held):
            return False
        self._begun = True
        if header is None:
            mark = next((each for each in self.markers if self._held.startswith(each)), "")
            self._held = self._held[len(mark) :]
            return bool(mark or not self._held.startswith("<"))
        self._held = self._held[header.end() :]
        name = recipient(header[0])
        if name is not None and (self._known is None or name in self._known):
            self._name, self._reader = name, NamedCall(self._calls, name)
        else:
            self._shown = header[1] == _FINAL and name is None
        return True
