"""The pool's second tier: chunks in files of its own on the node's disk. No Ray here.

One file per chunk, found again after a restart::

    0      8        12      16                       4096
    | KV-FILE1 | length | CRC-32 | metadata (JSON) | 0... | payload ...

Both numbers are little-endian uint32 and are about the metadata, which holds the payload's own CRC-32: it tells a
damaged file, and against people the directory's owner and mode (0700, files 0600) protect. A file's name is its chunk's
id, a hash that starts from the tenant's secret salt: neither names nor metadata say anything about a prompt. The
payload is what the model computed from it, and as confidential.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.kv.chunk import BadChunk, ChunkMeta
from serve_app.kv.index import GUARANTEED, ChunkIndex

log = logging.getLogger(__name__)

MAGIC = b"KV-FILE1"
# The payload starts on a page of its own, so that it can be mapped.
HEADER_BYTES = 4096
SUFFIX = ".kv"
# After the disk has refused a file (full, gone) it is left alone so long.
PAUSE_S = 60.0


@dataclass(slots=True)
class DiskStats:
    """Counts since the start, bytes as payload; ``bytes`` and ``chunks`` are what is there now."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    damaged: int = 0
    write_failures: int = 0
    recovered: int = 0
    bytes: int = 0
    chunks: int = 0


class DiskTier:
    """Chunks on disk, ``limit_bytes`` of them, the least recently used go first; see :class:`ChunkIndex` for shares.

    Methods that touch files block and are called in threads; ``index`` is for the event loop alone, and what a thread
    did to the files is entered there by the caller (:meth:`begin`, :meth:`commit`, :meth:`forget`).
    """

    def __init__(self, directory: Path, limit_bytes: int, guaranteed: float = GUARANTEED) -> None:
        """Takes the first of ``directory``/0, /1, ... that no other pool on this machine uses. Raises OSError."""
        self.index = ChunkIndex(limit_bytes, guaranteed)
        self.stats = DiskStats()
        self._paused_until = 0.0
        self._writing = threading.Lock()
        self.directory, self._lock = _take_slot(directory)

    def close(self) -> None:
        """Leaves the directory to another pool."""
        os.close(self._lock)

    def path(self, chunk_id: str) -> Path:
        return self.directory / chunk_id[:2] / (chunk_id + SUFFIX)

    # -- for the event loop ------------------------------------------------------------------------------------------

    def begin(self, meta: ChunkMeta) -> list[ChunkMeta] | None:
        """Makes room; returns the chunks whose files are to be deleted, or None: do not write this one."""
        if time.monotonic() < self._paused_until:
            return None
        evicted = self.index.reserve(meta)
        return None if evicted is None else [gone.meta for gone in evicted]

    def commit(self, meta: ChunkMeta, written: bool) -> bool:
        """Enters a chunk that :meth:`write` has written."""
        if not written:
            self.index.cancel(meta)
            self.stats.write_failures += 1
            self._paused_until = time.monotonic() + PAUSE_S
            return False
        self.stats.written += 1
        self.stats.written_bytes += meta.nbytes
        return self.index.commit(meta, None)

    def recover(self, meta: ChunkMeta) -> list[ChunkMeta]:
        """Enters a file that :meth:`scan` has found; returns the chunks whose files are to be deleted."""
        evicted = self.index.reserve(meta)
        if evicted is None:
            return [] if meta.chunk_id in self.index else [meta]
        self.index.commit(meta, None)
        self.stats.recovered += 1
        return [gone.meta for gone in evicted]

    def forget(self, chunk_id: str) -> ChunkMeta | None:
        """A chunk whose file turned out lost or damaged."""
        self.stats.damaged += 1
        return self.index.remove(chunk_id)

    # -- for threads -------------------------------------------------------------------------------------------------

    def write(self, meta: ChunkMeta, payload: NDArray[np.uint8]) -> bool:
        """Writes a chunk's file; False if the disk does not take it."""
        path = self.path(meta.chunk_id)
        draft = path.with_suffix(".new")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                file.write(_header(meta, zlib.crc32(payload.data)))
                view = memoryview(payload.data)
                while view:
                    view = view[file.write(view) :]
            os.replace(draft, path)
        except (OSError, BadChunk) as error:
            log.warning("chunk %s could not be written: %r", meta.chunk_id, error)
            with contextlib.suppress(OSError):
                draft.unlink()
            return False
        return True

    def read(self, meta: ChunkMeta) -> NDArray[np.uint8]:
        """The payload as a read-only view of the mapped file, which may be deleted meanwhile. Raises BadChunk."""
        path = self.path(meta.chunk_id)
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            os.utime(path)  # how recently it was used is known after a restart as well
        except (OSError, ValueError) as error:
            raise BadChunk(f"{path.name} cannot be read: {error}") from error
        known, crc = _parse(mapped[:HEADER_BYTES], len(mapped))
        if known != meta:
            raise BadChunk(f"{path.name} holds another chunk")
        payload = np.frombuffer(mapped, np.uint8, offset=HEADER_BYTES)
        if zlib.crc32(payload.data) != crc:
            raise BadChunk(f"{path.name} is damaged")
        return payload

    def delete(self, metas: list[ChunkMeta]) -> None:
        for meta in metas:
            with contextlib.suppress(OSError):
                self.path(meta.chunk_id).unlink()

    def scan(self) -> Iterator[ChunkMeta]:
        """What the directory holds, least recently used first; deletes what is not whole."""
        found = []
        for path in self.directory.glob("??/*"):
            try:
                status = path.stat()
                with path.open("rb") as file:
                    meta, _ = _parse(file.read(HEADER_BYTES), status.st_size)
                if path != self.path(meta.chunk_id):
                    raise BadChunk("under another name")
            except (OSError, BadChunk) as error:
                log.info("%s is no chunk: %s", path.name, error)
                path.unlink(missing_ok=True)
            else:
                found.append((status.st_mtime, meta))
        yield from (meta for _, meta in sorted(found, key=lambda pair: pair[0]))

    def counters(self) -> dict[str, int]:
        self.stats.bytes, self.stats.chunks = self.index.stats.bytes, self.index.stats.chunks
        return {name: getattr(self.stats, name) for name in self.stats.__slots__}


def _take_slot(directory: Path) -> tuple[Path, int]:
    for number in range(1000):
        slot = directory / str(number)
        slot.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The lock ends with the process that holds it.
        descriptor = os.open(slot / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        return slot, descriptor
    raise OSError(f"all of {directory} is in use")


def _header(meta: ChunkMeta, payload_crc: int) -> bytes:
    plain = {name: _plain(value) for name, value in meta.to_fields().items()}
    text = json.dumps({**plain, "crc": payload_crc}).encode()
    header = MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    if len(header) > HEADER_BYTES:
        raise BadChunk(f"metadata of {len(header)} bytes do not fit")
    return header.ljust(HEADER_BYTES, b"\0")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _unplain(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [_unplain(item) for item in value] if isinstance(value, list) else value


def _parse(header: bytes, file_bytes: int) -> tuple[ChunkMeta, int]:
    """Metadata and the payload's CRC-32. Raises BadChunk."""
    length, crc = (int.from_bytes(header[at : at + 4], "little") for at in (8, 12))
    text = header[16 : 16 + length]
    if header[:8] != MAGIC or len(text) != length or zlib.crc32(text) != crc:
        raise BadChunk("not a chunk's file")
    try:
        fields = {name: _unplain(value) for name, value in json.loads(text).items()}
        payload_crc = int(fields.pop("crc"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadChunk(f"not a chunk's metadata: {error}") from error
    meta = ChunkMeta.from_fields(fields)
    if file_bytes != HEADER_BYTES + meta.nbytes:
        raise BadChunk(f"{file_bytes} bytes are not those of {meta.nbytes} of payload")
    return meta, payload_crc
