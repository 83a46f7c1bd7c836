"""Has documents converted, each in a process of its own that is ended when it takes too long."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from serve_app.documents.formats import FORMATS, MEMORY_BYTES, SECONDS

ROOT = Path(__file__).resolve().parents[2]
# Documents that are converted at the same time, and those that may wait.
PROCESSES = 2
WAITING = 64
# Of this process's environment, which holds keys and the database's password.
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


class Crowded(RuntimeError):
    """Too many documents wait already."""


@dataclass(slots=True, frozen=True)
class Converted:
    """``text``: Markdown; or why there is none, ``error``."""

    text: str = ""
    error: str = ""


def installed() -> bool:
    """Whether there is anything to convert with."""
    return find_spec("markitdown") is not None


def supported() -> list[tuple[str, str]]:
    """Extensions and media types that can be converted here."""
    return [(known.extension, known.media_type) for known in FORMATS] if installed() else []


class Converter:
    """``convert`` documents one after the other in each of `PROCESSES` places."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._places = asyncio.Semaphore(PROCESSES)
        self._here = 0

    async def convert(self, name: str, media_type: str, data: bytes) -> Converted:
        """Raises :class:`Crowded`."""
        if self._here >= PROCESSES + WAITING:
            raise Crowded
        self._here += 1
        try:
            async with self._places:
                return await self._converted(name, media_type, data)
        finally:
            self._here -= 1

    async def _converted(self, name: str, media_type: str, data: bytes) -> Converted:
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve_app.documents.program", name[-200:], media_type[:200],
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        try:
            out, _ = await asyncio.wait_for(process.communicate(data), self._seconds)
        except TimeoutError:
            return Converted(error=f"it can't be converted within {self._seconds:g} seconds")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return Converted(**json.loads(out))
        except ValueError:
            return Converted(error=f"it can't be converted within {MEMORY_BYTES >> 20} MiB of memory, or is damaged")
