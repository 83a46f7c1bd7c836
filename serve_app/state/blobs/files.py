"""Blobs: a directory of this machine, or a bucket.

Names are paths like ``batches/abc/input.jsonl``. A blob is there as a whole or not at all, and only its owner can read
it. Where a bucket is and what opens it is told by the variables of AWS's own tools (``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, or a role). All calls block, and raise :class:`Away`
while a bucket cannot be reached or a disk takes nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from serve_app.state.errors import Away, StateError

log = logging.getLogger("ray.serve")

CHUNK = 1 << 20
# How long a bucket may take to accept a connection and to answer, and how often it is asked; the fewest bytes a second
# that it takes.
CONNECT_S, ANSWER_S, ASKED, SLOWEST = 3.0, 10.0, 2, 128 << 10
JOIN, JOIN_S = "complete_multipart_upload", 120.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=@+-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9_.=@+-]{0,199}){0,15}", re.ASCII)
# How often the log tells at most that nothing can be reached: who runs batches tries twice a second.
TELL_S = 10.0
# How often a blob is read that is replaced each time.
_TRIES = 5
# What is being written has a name that no blob can have.
_DRAFT = ".draft-"


class NoFile(Exception):
    """There is no blob of this name."""


class Replaced(OSError):
    """The blob was replaced while it was read, and the rest of the old one is gone. What was read is to be dropped."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EBUSY, f"{name} was replaced while it was read; read it again from its beginning")


class Files(Protocol):
    """``name``: up to 16 parts of letters, digits and ``_.=@+-``, joined by slashes; others raise ValueError.

    ``problem``: why they could not be had when they were last asked for.
    """

    problem: str | None

    def put(self, name: str, data: bytes | Iterable[bytes]) -> int:
        """Writes a blob, replacing one of this name in one step; its length. An error on the way leaves what was."""

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from ``start`` up to ``end``, all of one version. Raises :class:`NoFile`, and :class:`Replaced` if
        the blob is replaced faster than it can be read.
        """

    def stream(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The same in pieces of up to :data:`CHUNK` bytes. Raises :class:`Replaced` if the blob is replaced behind the
        first piece, where the old one cannot be read to its end: in a bucket.
        """

    def size(self, name: str) -> int:
        """Raises :class:`NoFile`."""

    def delete(self, name: str) -> bool:
        """Whether there was such a blob."""

    def below(self, folder: str) -> list[str]:
        """Names of the blobs and folders directly below a folder, without what is above them, in no order."""

    def list(self, prefix: str = "") -> list[str]:
        """Names that begin with ``prefix``, in order."""

    def delete_below(self, folder: str) -> None:
        """Deletes all blobs below a folder, and what is left of ones that were never finished."""

    def delete_drafts(self, folder: str, before: float) -> None:
        """Deletes what lies directly below a folder of blobs that were never finished, and that nobody has written to
        since a unix time. A bucket looks after that itself.
        """


def open_files(where: str) -> Files:
    """``where``: a directory, or ``s3://bucket/prefix``. Raises :class:`StateError`."""
    if "://" not in where:
        return DirectoryFiles(Path(where).expanduser())
    if not where.startswith("s3://") or not where[5:].strip("/"):
        raise StateError(f"SERVE_APP_FILES is {where!r}. Use a directory or s3://BUCKET/PREFIX.")
    try:
        return BucketFiles(_bucket(), where[5:].strip("/"))
    except ImportError:
        raise StateError("SERVE_APP_FILES names S3, which needs s3fs: pip install 'serve-app[s3]'.") from None


def _bucket() -> Any:
    """s3fs with bounds of time: its own tries take seven minutes where nobody answers, and a PUT waits for ever."""
    import s3fs
    from fsspec.asyn import sync_wrapper

    class Bounded(s3fs.S3FileSystem):
        # Multiplies those of the client below it.
        retries = 1

        async def _call_s3(self, method: str, *arguments: Any, **named: Any) -> Any:
            body = named.get("Body")
            # A bucket may take its time to put the parts of a large blob together.
            more_s = len(body) / SLOWEST if isinstance(body, bytes) else JOIN_S * (method == JOIN)
            async with asyncio.timeout(ASKED * (CONNECT_S + ANSWER_S) + more_s):
                return await super()._call_s3(method, *arguments, **named)

        call_s3 = sync_wrapper(_call_s3)

    patience = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S}
    tries = {"mode": "standard", "total_max_attempts": ASKED}
    # What another gateway wrote is to be seen: nothing listed is remembered.
    return Bounded(config_kwargs={**patience, "retries": tries}, use_listings_cache=False, skip_instance_cache=True)


class _FsspecFiles:
    """What a directory and a bucket have in common. A bucket says EBUSY where a blob is replaced while it is read."""

    # Errors that say that what is asked for cannot be had now.
    _away: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root
        self._tell_at = 0.0
        self.problem: str | None = None

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        for _ in range(_TRIES - 1):
            with suppress(Replaced):
                return b"".join(self.stream(name, start, end))
        return b"".join(self.stream(name, start, end))

    def stream(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        for left in reversed(range(_TRIES)):
            begun = False
            try:
                for piece in self._pieces(name, start, end):
                    begun = True
                    yield piece
                self.problem = None
                return
            except FileNotFoundError:
                if begun:
                    raise Replaced(name) from None
                raise NoFile(name) from None
            except self._away as error:
                if getattr(error, "errno", None) != errno.EBUSY:
                    raise self._gone(error) from error
                if begun or not left:
                    raise Replaced(name) from error

    def _pieces(self, name: str, start: int, end: int | None) -> Iterator[bytes]:
        with self._system.open(self._path(name), "rb", block_size=CHUNK) as file:
            file.seek(start)
            at = start
            while end is None or at < end:
                piece = file.read(CHUNK if end is None else min(CHUNK, end - at))
                if not piece:
                    return
                at += len(piece)
                yield piece

    def size(self, name: str) -> int:
        try:
            with self._reaching():
                return int(self._system.size(self._path(name)))
        except FileNotFoundError:
            raise NoFile(name) from None

    def delete(self, name: str) -> bool:
        path = self._path(name)
        with self._reaching():
            if not self._system.exists(path):
                return False
            with suppress(FileNotFoundError):
                self._system.rm_file(path)
        return True

    def below(self, folder: str) -> list[str]:
        try:
            with self._reaching():
                found = self._system.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return [name for path in found if _NAME.fullmatch(name := path.rstrip("/").rpartition("/")[2])]

    def list(self, prefix: str = "") -> list[str]:
        folder, slash, _ = prefix.rpartition("/")
        where = self._path(folder) if slash else self._root
        with self._reaching():
            found = [path[len(self._root) :].lstrip("/") for path in self._system.find(where)]
        return sorted(name for name in found if name.startswith(prefix) and _NAME.fullmatch(name))

    def delete_below(self, folder: str) -> None:
        for name in self.list(f"{folder}/"):
            self.delete(name)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except self._away as error:
            raise self._gone(error) from error
        self.problem = None

    def _gone(self, error: Exception) -> Away:
        if (now := time.monotonic()) >= self._tell_at:
            self._tell_at = now + TELL_S
            log.warning("files in %s cannot be reached: %s: %s", self._root, type(error).__name__, error)
        self.problem = f"files in {self._root}: {error or type(error).__name__}"
        return Away(self.problem)

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:100]!r} is no name of a file")
        return f"{self._root}/{name}"


class DirectoryFiles(_FsspecFiles):
    def __init__(self, root: Path) -> None:
        from fsspec.implementations.local import LocalFileSystem

        super().__init__(LocalFileSystem(), str(root.resolve()))
        root.parent.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if start or end is not None:
            return super().get(name, start, end)
        try:
            # In one read: nothing is copied twice.
            with self._reaching(), open(self._path(name), "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            raise NoFile(name) from None

    def put(self, name: str, data: bytes | Iterable[bytes]) -> int:
        path = Path(self._path(name))
        draft = path.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
        with self._reaching():
            for folder in reversed(path.relative_to(self._root).parents):
                (Path(self._root) / folder).mkdir(exist_ok=True, mode=0o700)
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                # Whoever yields the pieces has errors of his own.
                for piece in (data,) if isinstance(data, bytes) else data:
                    with self._reaching():
                        _write(file, piece)
                with self._reaching():
                    os.fsync(file.fileno())
                length = file.tell()
            with self._reaching():
                os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return length

    def delete_below(self, folder: str) -> None:
        path = self._path(folder)
        with suppress(FileNotFoundError), self._reaching():
            shutil.rmtree(path)

    def delete_drafts(self, folder: str, before: float) -> None:
        for draft in Path(self._path(folder)).glob(f"{_DRAFT}*"):
            with suppress(FileNotFoundError):
                if draft.stat().st_mtime < before:
                    draft.unlink()


def _write(file: FileIO, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


class BucketFiles(_FsspecFiles):
    def __init__(self, system: Any, root: str) -> None:
        from botocore.exceptions import BotoCoreError

        super().__init__(system, root)
        self._away = (OSError, BotoCoreError)

    def put(self, name: str, data: bytes | Iterable[bytes]) -> int:
        with self._reaching():
            file = self._system.open(self._path(name), "wb", block_size=8 * CHUNK)
        try:
            # Whoever yields the pieces has errors of his own.
            for piece in (data,) if isinstance(data, bytes) else data:
                with self._reaching():
                    file.write(piece)
            length = int(file.tell())
        except BaseException:
            # Nothing is there before an upload is closed; this one never is.
            with suppress(Exception):
                file.discard()
            file.closed = True
            raise
        with self._reaching():
            file.close()
        return length

    def delete_drafts(self, folder: str, before: float) -> None:
        """Uploads that are never closed are no blobs."""
