"""Follows one JSON object or array through text that arrives in pieces: where it ends, and whether it is broken."""

from __future__ import annotations

import re

_CLOSERS = {"{": "}", "[": "]"}
_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_ESCAPED = re.compile(r"\\.", re.DOTALL)


def in_string(text: str) -> bool:
    """Whether the end of ``text``, the beginning of a JSON value, lies inside a string."""
    return _ESCAPED.sub("", text).count('"') % 2 == 1


class JsonScanner:
    """`feed` takes text from the value's first character on. ``closed``: the value is complete. ``broken``: brackets
    that do not match, or ``stop`` (a closing tag) outside a string; ``stopped`` tells the second case.

    Control characters inside strings, which models write and JSON forbids, come out escaped.
    """

    __slots__ = ("_escaped", "_stack", "_stop", "_string", "broken", "closed", "stopped")

    def __init__(self, *, stop: str = "", depth: str = "") -> None:
        self._stop = stop
        self._stack = list(depth)
        self._string = False
        self._escaped = False
        self.closed = False
        self.broken = False
        self.stopped = False

    def feed(self, text: str, final: bool = False) -> tuple[str, int]:
        """What of ``text`` belongs to the value, and how many characters of it were read; an end that may become
        ``stop`` is left for the next call unless ``final``."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.closed and not self.stopped:
            if self._escaped:
                self._escaped = False
                out.append(text[at])
                at += 1
                continue
            found = (_INSIDE if self._string else _OUTSIDE).search(text, at)
            if found is None:
                out.append(text[at:])
                return "".join(out), len(text)
            out.append(text[at : found.start()])
            at = found.start()
            char = text[at]
            if char == "<" and self._stop:
                rest = text[at : at + len(self._stop)]
                if rest == self._stop:
                    self.stopped = self.broken = True
                    break
                if self._stop.startswith(rest) and not final:
                    break
            out.append(self._take(char))
            at += 1
        return "".join(out), at

    def _take(self, char: str) -> str:
        if self._string:
            if char == '"':
                self._string = False
            elif char == "\\":
                self._escaped = True
            else:
                return f"\\u{ord(char):04x}"
        elif char == '"':
            self._string = True
        elif char in _CLOSERS:
            self._stack.append(char)
        elif char in "}]" and not self.broken:
            if not self._stack or _CLOSERS[self._stack.pop()] != char:
                self.broken = True
            elif not self._stack:
                self.closed = True
        return char
