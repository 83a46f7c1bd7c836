"""Adapters as the model takes them, kept on the node's disk: one that is loaded again is only read, not packed.

A file is named by the digest of the adapter's content, in a folder for each layout of a model's linears. It is whole
once it has its name. What nobody has used for two hours goes, and what was used least recently where there are too many
bytes: so an adapter that its owner has deleted does not stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.worker.adapters import behind_the_step

if TYPE_CHECKING:
    from serve_app.models.adapters import AdapterBank, Prepared

log = logging.getLogger(__name__)

KEPT_S = 2 * 3600.0
# Of what is free on the disk, with the files that are there.
SHARE = 0.5
# How often the folder is looked through, and of the bytes that may be there how many are written before it is again:
# with thousands of files that takes as long as writing one.
SWEEP_S = 60.0
UNSWEPT = 1 / 16


class PackedFiles:
    """Reads block; :meth:`keep` returns at once. Several workers of a node may share the folder."""

    def __init__(self, folder: Path, bank: AdapterBank, limit: int) -> None:
        self._folder, self._bank, self._limit = folder, bank, limit
        self._swept, self._unswept = 0.0, 0
        self._writer = ThreadPoolExecutor(1, "packed-adapters", initializer=behind_the_step)
        with contextlib.suppress(OSError):  # without a disk adapters are packed each time
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.sweep(time.time())

    def read(self, digest: str) -> Prepared | None:
        """None where there is none, or one that cannot be read."""
        path = self._folder / digest
        try:
            with path.open("rb", buffering=0) as file:
                found = self._bank.read_packed(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("the packed adapter %s is not used: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # a disk that takes no more can still be read
            os.utime(path)
        return found

    def keep(self, digest: str, prepared: Prepared) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._writer.submit(self._write, digest, prepared)

    def close(self) -> None:
        """Ends what is being written."""
        self._writer.shutdown()

    def sweep(self, now: float) -> None:
        """Deletes what is too old, and too much."""
        self._swept, self._unswept = now, 0
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                told = entry.stat()
                found.append((told.st_mtime, told.st_size, entry.path))
        held = sum(size for _, size, _ in found)
        limit = min(self._limit, SHARE * (shutil.disk_usage(self._folder).free + held))
        for used, size, path in sorted(found):
            if held > limit or used < now - KEPT_S:
                Path(path).unlink(missing_ok=True)
                held -= size

    def _write(self, digest: str, prepared: Prepared) -> None:
        part = self._folder / f".{digest}.{os.getpid()}"
        try:
            with part.open("wb", buffering=0) as file:
                for data in self._bank.written(prepared):
                    left = memoryview(data)
                    while left:
                        left = left[file.write(left) :]
                os.fsync(file.fileno())
            self._unswept += part.stat().st_size
            part.replace(self._folder / digest)
            now = time.time()
            if self._unswept > UNSWEPT * self._limit or not 0 <= now - self._swept < SWEEP_S:
                self.sweep(now)
        except OSError as error:
            log.warning("a packed adapter is not kept: %s", error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
