"""Records in a temporary file, read back in any order: what a batch holds meanwhile instead of memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile

# Up to this size it stays in memory.
IN_MEMORY = 4 << 20


class Spool:
    """``number`` of a record: how many were there before it."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115
        self._ends = array("q")
        self._end = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, record: bytes) -> None:
        self._file.write(record)
        self._end += len(record)
        self._ends.append(self._end)

    def size(self, number: int) -> int:
        return self._ends[number] - (self._ends[number - 1] if number else 0)

    def get(self, number: int) -> bytes:
        start = self._ends[number - 1] if number else 0
        self._file.seek(start)
        return self._file.read(self._ends[number] - start)

    def __iter__(self) -> Iterator[bytes]:
        for number in range(len(self)):
            yield self.get(number)

    def close(self) -> None:
        self._file.close()
