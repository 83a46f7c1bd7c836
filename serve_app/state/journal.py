"""Rows that wait for the store, in a file of this process, so that its end does not lose them.

Written while the store is away, emptied when it is back. What a process leaves that ended before is found by the next
one of the same state directory. A record is its length (4 bytes), a checksum (4 bytes) and msgpack; a torn one at the
end is what a process was writing when it died, and ends the file. One that is damaged is left out with a word in the
log, and the file is kept.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from serve_app.state.protocols import Row

log = logging.getLogger("ray.serve")

_HEAD = struct.Struct("<II")
_PROBE_BYTES = 4096


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of :class:`Row`."""

    kind: str
    key: tuple[str, ...]
    columns: dict[str, Any]
    size: int


_RECORDS = msgspec.msgpack.Decoder(_Record)


class Journal:
    """``folder``: of all processes that share a state directory. Nothing is made there before the first record.
    ``name``: what the file's name begins with. ``fsync``: rows outlive a loss of power as well.
    """

    def __init__(self, folder: Path, name: str = "", *, fsync: bool = False) -> None:
        self._folder = folder
        self._fsync = fsync
        self._descriptor: int | None = None
        self._path = folder / f"{name or os.getpid()}-{os.urandom(4).hex()}.journal"
        self.bytes = 0

    def append(self, rows: Iterable[Row]) -> None:
        """Returns when the rows outlive this process, and with ``fsync`` a loss of power. Raises :class:`OSError`."""
        packed = b"".join(pack(row) for row in rows)
        self._write(packed)
        self.bytes += len(packed)

    def probe(self) -> None:
        """Whether something could be written now. Raises :class:`OSError`."""
        os.ftruncate(self._write(bytes(_PROBE_BYTES)), self.bytes)

    def _write(self, data: bytes) -> int:
        """All of ``data`` or nothing; the file."""
        if self._descriptor is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = self._open()
            if self._fsync:
                self._sync_folder()
        if os.write(self._descriptor, data) < len(data):
            # A part of a record would hide all that come after it.
            os.ftruncate(self._descriptor, self.bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._fsync:
            try:
                os.fdatasync(self._descriptor)
            except OSError:
                # Nobody knows what is on the disk: these rows are not, as far as anybody is told.
                os.ftruncate(self._descriptor, self.bytes)
                raise
        return self._descriptor

    def _sync_folder(self) -> None:
        """A file whose name is lost is lost."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _open(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # Held as long as this process lives: a file that is not locked is an orphan.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
            # Somebody took it for one before it was locked.
            os.close(descriptor)

    def clear(self) -> None:
        """All that was written is in the store."""
        if self.bytes and self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
        self.bytes = 0

    def close(self) -> None:
        """An empty file goes; one with records stays for the next process."""
        if self._descriptor is not None:
            if not self.bytes:
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def orphan(self) -> Iterator[list[Row]]:
        """The rows of a process that has ended, none if there is no such process. They are forgotten when the block
        ends without an error. A file that is damaged in its midst is kept as `*.damaged`.
        """
        for path in sorted(self._folder.glob("*.journal")):
            if path == self._path:
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            try:
                rows, damaged = unpack(os.pread(descriptor, os.fstat(descriptor).st_size, 0), path)
                if rows:
                    yield rows
                if damaged:
                    path.rename(path.with_suffix(".damaged"))
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
            if rows:
                return
        yield []


def pack(row: Row) -> bytes:
    """One record."""
    body = msgspec.msgpack.encode([row.kind, row.key, row.columns, row.size])
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def unpack(data: bytes, path: Path) -> tuple[list[Row], bool]:
    """The rows of a file, and whether something among them cannot be read although it was written as a whole."""
    rows: list[Row] = []
    at, wrong = 0, list[str]()
    while at + _HEAD.size <= len(data):
        found = _record(data, at)
        if isinstance(found, str):
            after = _next(data, at + 1)
            if after is None and found == _TORN:
                break
            wrong.append(f"byte {at}: {found}")
            at = len(data) if after is None else after
        else:
            row, at = found
            rows.append(row)
    if wrong:
        told = f"{len(wrong)} parts are none of our records, the first at {wrong[0]}"
        log.error("%s: %s; the file is kept as %s.damaged", path.name, told, path.stem)
    return rows, bool(wrong)


_TORN = "it ends too early"
# What every body begins with: a list of four.
_BEGINS = b"\x94"


def _next(data: bytes, at: int) -> int | None:
    """Where the first record behind ``at`` begins."""
    while (body := data.find(_BEGINS, at + _HEAD.size)) >= 0:
        at = body - _HEAD.size
        if isinstance(_record(data, at), tuple):
            return at
        at += 1
    return None


def _record(data: bytes, at: int) -> tuple[Row, int] | str:
    """The record that begins there, and where it ends; or what is wrong with it."""
    length, checksum = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + length
    if end > len(data):
        return _TORN
    body = memoryview(data)[at + _HEAD.size : end]
    if zlib.crc32(body) != checksum:
        return "its checksum is another"
    try:
        record = _RECORDS.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error)
    return Row(record.kind, record.key, record.columns, record.size), end
