"""Which processes of a node live: each holds a lock on a file of its own, and a file that nobody holds is left over."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Owner:
    """This process. ``folder``: of all processes that share a state directory. Nothing is made there before
    :meth:`live`.
    """

    def __init__(self, folder: Path) -> None:
        self.id = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._folder = folder
        self._held: int | None = None

    def live(self) -> None:
        """Says that this process lives, for as long as it does. Raises :class:`OSError`."""
        if self._held is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Under its name only once it is held: nobody may take it for one that has ended.
            draft = self._folder / f".{self.id}"
            self._held = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX)
            draft.rename(self._path(self.id))

    def end(self) -> None:
        """Nothing is left of this process that others would have to look after."""
        if self._held is not None:
            self._path(self.id).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Others may look after what is left."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @contextmanager
    def ended(self) -> Iterator[list[str]]:
        """Processes that have ended and were not forgotten. One process at a time looks after them, the others see
        none.
        """
        if not self._folder.is_dir():
            yield []
            return
        alone = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield []
                return
            paths = sorted(self._folder.glob("*.gateway"))
            yield [path.stem for path in paths if path.stem != self.id and _free(path)]
        finally:
            os.close(alone)

    def forget(self, owner: str) -> None:
        """Nothing is left of it."""
        self._path(owner).unlink(missing_ok=True)

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}.gateway"


def _free(path: Path) -> bool:
    """Whether nobody holds the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
