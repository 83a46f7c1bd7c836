"""Reader of calls whose arguments are written one after another, each as a key and a value: GLM's and DeepSeek's.

Strings stand as they are, everything else as JSON. Strings are told as they come, other values once they are complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from serve_app.text.tool_calls.base import CallPiece, Growing, Verdict, json_text, prefix_at_end
from serve_app.text.tool_calls.declared import KINDS, parameter_kinds, typed
from serve_app.text.tool_calls.json_scanner import in_string

# Longer than that no marks and key before a value can be together.
LONGEST = 512
_STRING = frozenset(("string",))


@dataclass(slots=True, frozen=True)
class ParameterForm:
    """The marks of a format.

    ``open``: what stands before a value, with the groups ``key`` and ``string``, which says "true" where the value is
    a string, "false" where it is JSON, and is None where the tool's schema has to tell; ``opens``: how it begins;
    ``end``: what stands behind a value; ``close``: what stands behind the last one.
    """

    open: re.Pattern[str]
    opens: str
    end: str
    close: str


class ParameterCall:
    """The arguments of a call whose ``name`` stood before them; ``parameters`` is the tool's schema."""

    def __init__(self, call: int, name: str, parameters: Any, form: ParameterForm) -> None:
        self.started = False
        self._growing = Growing(call)
        self._name = name
        self._parameters = parameters
        self._form = form
        self._count = 0
        # Of the value that is being read: the types it may have, None between values; the JSON text of its key; and
        # how much of it was searched for its end.
        self._kinds: frozenset[str] | None = None
        self._key = ""
        self._seen = 0

    def read(self, text: str, final: bool) -> tuple[CallPiece | None, int, Verdict]:
        piece = self._growing.piece("" if self.started else self._name)
        self.started = True
        at = 0
        while True:
            if self._kinds is None:
                found = self._form.open.match(text, at)
                if found is None:
                    return self._between(piece, text, at, final)
                at = found.end()
                self._begin(piece, found)
            taken = self._value(piece, text[at:], final)
            at += taken
            if self._kinds is not None:
                piece.last = final
                return piece, at, Verdict.DONE if final else Verdict.MORE

    def _between(self, piece: CallPiece, text: str, at: int, final: bool) -> tuple[CallPiece, int, Verdict]:
        """What stands where a parameter could: nothing yet, the end of the call, or the broken beginning of one."""
        rest = text[at:].lstrip()
        begun = rest.startswith(self._form.opens)
        possible = begun or any(mark.startswith(rest) for mark in (self._form.opens, self._form.close))
        if possible and not final and len(rest) < LONGEST and self._form.close not in rest:
            return piece, at, Verdict.MORE
        if not self._count:
            piece.arguments += "{"
        if not begun:
            piece.arguments += "}"
        piece.last = True
        return piece, len(text) if begun and final else at, Verdict.DONE

    def _begin(self, piece: CallPiece, found: re.Match[str]) -> None:
        key, told = found["key"], found.groupdict().get("string")
        self._seen = 0
        self._kinds = parameter_kinds(self._parameters, key) if told is None else KINDS
        self._key = f"{', ' if self._count else '{'}{json_text(key)}: "
        self._count += 1
        if told == "true" or self._kinds == _STRING:
            self._kinds = _STRING
            piece.arguments += f'{self._key}"'
        elif told == "false":
            # The model says that it is JSON.
            self._kinds = KINDS - _STRING

    def _value(self, piece: CallPiece, text: str, final: bool) -> int:
        """Reads on in the value at the start of ``text``; how many characters are read for good."""
        assert self._kinds is not None
        mark = self._form.end
        if self._kinds == _STRING:
            end = text.find(mark)
            size = end if end >= 0 else len(text) - (0 if final else prefix_at_end(text, mark))
            piece.arguments += json_text(text[:size])[1:-1]
            if end < 0:
                return size
            piece.arguments += '"'
        else:
            end = self._end(text, final)
            if end < 0:
                # A value that was cut stays as the model wrote it.
                piece.arguments += self._key + text if final else ""
                return len(text) if final else 0
            piece.arguments += self._key + typed(text[:end], self._kinds)
        self._kinds = None
        return end + len(mark)

    def _nested(self, first: str) -> bool:
        """Whether a value that begins like that is JSON with strings in it."""
        assert self._kinds is not None
        if first == '"':
            return "string" not in self._kinds
        return {"{": "object", "[": "array"}.get(first, "") in self._kinds

    def _end(self, text: str, final: bool) -> int:
        """Where a value that may be JSON ends, which holds the mark in its strings perhaps; -1 for not yet."""
        mark = self._form.end
        first = at = text.find(mark, 0 if final else max(0, self._seen - len(mark)))
        nested = self._nested(text.lstrip()[:1])
        while at >= 0 and nested and in_string(text[:at]):
            at = text.find(mark, at + 1)
        self._seen = len(text) if first < 0 else self._seen
        return first if at < 0 and final else at
