"""A batch's input in pieces, cut into requests: the lines of a file, or the items of an array in a JSON object."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput

# What stands around the items of an array.
MAX_OUTSIDE = 64 << 10
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)


def lines(pieces: Iterable[bytes], longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers from 0; None for one of more than ``longest`` bytes."""
    number, rest, skipping = 0, b"", False
    for piece in pieces:
        parts = (rest + piece).split(b"\n")
        rest = parts.pop()
        for part in parts:
            if skipping or len(part) > longest:
                yield number, None
                skipping = False
            elif part.strip():
                yield number, part
            number += 1
        if len(rest) > longest:
            rest, skipping = b"", True
    if skipping:
        yield number, None
    elif rest.strip():
        yield number, rest


class ArrayItems:
    """Cuts the array ``name`` of a JSON object, which comes in pieces, into its items. What is inside of an item is not
    looked at: whoever reads it finds what is wrong there.
    """

    def __init__(self, name: str, longest: int) -> None:
        self._name = orjson.dumps(name)
        self._shown = name
        self._longest = longest
        self._buffer = b""
        self._at = 0  # how far the buffer has been looked through
        self._kept = 0  # up to where it has been taken
        self._depth = 0
        self._key = b""
        self._inside = False
        self._done = False
        self._outside = b""
        self._items = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The items that are complete now. Raises `InvalidInput`."""
        self._buffer = self._buffer[self._kept :] + piece
        self._at -= self._kept
        self._kept = 0
        for token in _TOKEN.finditer(self._buffer, self._at):
            text = token.group()
            if text == b'"':  # a string whose end has not come
                self._at = token.start()
                break
            self._at = token.end()
            if text in b"[{":
                self._depth += 1
                if self._depth == 2 and text == b"[" and self._key == self._name and not self._done:
                    self._enter(token.end())
                elif self._inside and self._depth == 3:
                    self._gap(token.start())
            elif text in b"]}":
                self._depth -= 1
                if self._inside and self._depth == 2:
                    yield self._item(token.end())
                elif self._inside and self._depth == 1:
                    self._leave(token.start())
            elif self._inside and self._depth == 2:
                self._gap(token.start())
                yield self._item(token.end())
            elif self._depth == 1:
                self._key = text
        else:
            self._at = len(self._buffer)
        self._check_size()

    def finish(self) -> dict[str, Any]:
        """The object without the array's items. Raises `InvalidInput`."""
        if self._inside:
            raise InvalidInput(f"The body ends inside of {self._shown}; send it whole.", param=self._shown)
        if not self._done:
            raise InvalidInput(f"{self._shown} is missing; send an array of requests.", param=self._shown)
        try:
            return orjson.loads(self._outside + self._buffer[self._kept :])
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"The body is not valid JSON: {error}. Send a JSON object in UTF-8.") from None

    def _enter(self, at: int) -> None:
        self._inside = True
        self._outside = self._buffer[self._kept : at]
        self._kept = at

    def _leave(self, at: int) -> None:
        if self._buffer[self._kept : at].strip():
            raise self._broken()
        self._inside, self._done = False, True
        self._kept = at

    def _gap(self, at: int) -> None:
        """Between two items stands a comma and nothing else."""
        if self._buffer[self._kept : at].strip() != (b"," if self._items else b""):
            raise self._broken()
        self._kept = at

    def _item(self, end: int) -> bytes:
        found = self._buffer[self._kept : end]
        if len(found) > self._longest:
            raise self._too_long()
        self._kept = end
        self._items += 1
        return found

    def _too_long(self) -> InvalidInput:
        message = f"Item {self._items} of {self._shown} is larger than {self._longest} bytes; send less in one."
        return InvalidInput(message, param=f"{self._shown}[{self._items}]")

    def _broken(self) -> InvalidInput:
        return InvalidInput(
            f"{self._shown} is not a valid array of objects behind its item {self._items}.", param=self._shown
        )

    def _check_size(self) -> None:
        waits = len(self._buffer) - self._kept
        if self._inside and waits > self._longest:
            raise self._too_long()
        if not self._inside and waits > MAX_OUTSIDE:
            raise InvalidInput(f"More than {MAX_OUTSIDE} bytes stand outside of {self._shown}.")
