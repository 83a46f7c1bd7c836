"""Streams under way, as they would be charged if their gateway died now: a file that is written anew again and again.

Their clients have seen a part, so the one who takes a dead gateway's journal over charges for that part. Only its last
file counts, and an entry of the journal comes before one of it: that is how the work really ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_app.state.journal import pack, unpack
from serve_app.state.protocols import Row

_KIND, _DRAFT = ".open", ".opening"


class OpenEntries:
    """``name``: of this process in ``folder``, with which the names of its journals begin."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}{_KIND}"
        self._held: int | None = None

    def write(self, rows: Iterable[Row]) -> None:
        """These instead of those that were written before. Raises :class:`OSError`; then those stay."""
        packed = b"".join(pack(row) for row in rows)
        if not packed:
            self.clear()
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Under its name only once it is complete, and held: nobody may take it for one of a process that has ended.
        draft = self._path.with_suffix(_DRAFT)
        descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.write(descriptor, packed) < len(packed):
                raise OSError("the disk is full")
            draft.rename(self._path)
        except OSError:
            os.close(descriptor)
            raise
        self._release()
        self._held = descriptor

    def clear(self) -> None:
        """Nothing is under way."""
        if self._held is not None:
            self._path.unlink(missing_ok=True)
            self._release()

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @contextmanager
    def orphan(self) -> Iterator[list[Row]]:
        """The rows of a process that has ended and whose journals have been taken over, none if there is no such. They
        are forgotten when the block ends without an error.
        """
        folder = self._path.parent
        for draft in folder.glob(f"*{_DRAFT}"):
            if (descriptor := _free(draft)) is not None:
                draft.unlink(missing_ok=True)
                os.close(descriptor)
        for path in sorted(folder.glob(f"*{_KIND}")):
            if path == self._path or (descriptor := _free(path)) is None:
                continue
            try:
                if not any(folder.glob(f"{path.stem}-*.journal")):
                    yield unpack(os.pread(descriptor, os.fstat(descriptor).st_size, 0), path)[0]
                    path.unlink(missing_ok=True)
                    return
            finally:
                os.close(descriptor)
        yield []

    def waits(self) -> bool:
        """Whether a process that has ended has left rows."""
        for path in self._path.parent.glob(f"*{_KIND}"):
            if path != self._path and (descriptor := _free(path)) is not None:
                os.close(descriptor)
                return True
        return False


def _free(path: Path) -> int | None:
    """The file, where no process that lives has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
