"""Readers of calls written as JSON: the whole call as an object, or the arguments alone after a name."""

from __future__ import annotations

import re

from serve_app.text.tool_calls.base import CallPiece, Growing, Verdict, json_at, whole_call
from serve_app.text.tool_calls.json_scanner import JsonScanner

# How nearly every call begins. Whatever begins otherwise is read once it is complete.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\\n]|\\.)+")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class ObjectCall:
    """``{"name": ..., "arguments": {...}}``, or with ``parameters``; ``stop`` is the tag that closes the format.

    ``known``: names that count; None for any. The arguments are told as they come.
    """

    def __init__(self, call: int, *, stop: str = "", known: frozenset[str] | None = None) -> None:
        self.started = False
        self._growing = Growing(call)
        self._stop = stop
        self._known = known
        self._arguments: JsonScanner | None = None
        self._rest: JsonScanner | None = None
        self._seen = 0

    def read(self, text: str, final: bool) -> tuple[CallPiece | None, int, Verdict]:
        if self._arguments is None:
            name, taken = self._head(text)
            if name is None:
                return self._whole(text, final)
            self.started = True
            self._arguments = JsonScanner(stop=self._stop)
            piece, more, verdict = self._go_on(text[taken:], final)
            piece.name = name
            return piece, taken + more, verdict
        return self._go_on(text, final)

    def _head(self, text: str) -> tuple[str | None, int]:
        found = _HEAD.match(text)
        if found is None:
            return None, 0
        name = json_at(found[1])[0]
        if not isinstance(name, str) or (self._known is not None and name not in self._known):
            return None, 0
        return name, found.end()

    def _whole(self, text: str, final: bool) -> tuple[CallPiece | None, int, Verdict]:
        # Only a closing bracket can complete an object: no need to look again before one comes.
        fresh, self._seen = text[self._seen :], len(text)
        value, end = json_at(text) if final or "}" in fresh or "]" in fresh else (None, None)
        if end is None:
            return None, len(text) if final else 0, Verdict.NO_CALL if final else Verdict.MORE
        found = whole_call(value, "arguments", "parameters")
        if found is None or (self._known is not None and found[0] not in self._known):
            return None, end, Verdict.NO_CALL
        self.started = True
        return self._growing.piece(*found, last=True), end, Verdict.DONE

    def _go_on(self, text: str, final: bool) -> tuple[CallPiece, int, Verdict]:
        assert self._arguments is not None
        piece = self._growing.piece()
        taken = 0
        if self._rest is None:
            piece.arguments, taken = self._arguments.feed(text, final)
            if self._arguments.stopped or (final and not self._arguments.closed):
                piece.last = True
                return piece, taken, Verdict.DONE
            if not self._arguments.closed:
                return piece, taken, Verdict.MORE
            # What stands behind the arguments, an id perhaps, is nobody's business.
            self._rest = JsonScanner(stop=self._stop, depth="{")
            piece.last = True
        _, more = self._rest.feed(text[taken:], final)
        ended = self._rest.closed or self._rest.broken or final
        return piece, taken + more, Verdict.DONE if ended else Verdict.MORE


class NamedCall:
    """The arguments of a call whose ``name`` stood before them: one JSON object."""

    def __init__(self, call: int, name: str) -> None:
        self.started = False
        self._growing = Growing(call)
        self._name = name
        self._arguments = JsonScanner()

    def read(self, text: str, final: bool) -> tuple[CallPiece | None, int, Verdict]:
        lead = 0
        if not self.started:
            lead = len(text) - len(text.lstrip())
            if lead == len(text):
                return None, 0, Verdict.NO_CALL if final else Verdict.MORE
            if text[lead] != "{":
                return None, 0, Verdict.NO_CALL
        arguments, taken = self._arguments.feed(text[lead:], final)
        piece = self._growing.piece("" if self.started else self._name, arguments, last=self._arguments.closed or final)
        self.started = True
        return piece, lead + taken, Verdict.DONE if piece.last else Verdict.MORE
