"""Has documents converted, each in a process of its own that is ended when it takes too long."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from serve_app.documents.formats import ERROR, FORMATS, MEMORY_BYTES, SECONDS, TEXT, format_of
from serve_app.media.preparing import Full, Lane

ROOT = Path(__file__).resolve().parents[2]
# Documents that are converted at the same time, and those that may wait.
PROCESSES = 2
WAITING = 64
# Of this process's environment, which holds keys and the database's password.
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


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
    """``convert`` documents one after the other in each of `PROCESSES` places, of which an account has one."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._places = Lane(PROCESSES, 1)
        self._here: Counter[bytes] = Counter()

    async def convert(self, account: str, name: str, media_type: str, data: bytes) -> Converted:
        """Raises `preparing.Full`; an account has its share of what may wait whatever others send."""
        whose, most = account.encode(), PROCESSES + WAITING
        if self._here.total() >= most and self._here[whose] >= most // len({*self._here, whose}):
            raise Full
        self._here[whose] += 1
        try:
            await self._places.enter(whose)
            try:
                return await self._converted(name, media_type, data)
            finally:
                self._places.leave(whose)
        finally:
            self._here[whose] -= 1
            if not self._here[whose]:
                del self._here[whose]

    async def _converted(self, name: str, media_type: str, data: bytes) -> Converted:
        known = format_of(name, media_type)
        if known is None:
            endings = ", ".join(known.extension for known in FORMATS)
            return Converted(error=f"its format is not known; send one of {endings}")
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
        # Nothing of the folder it is started in, which may be anybody's; and what libraries say of a document is for no
        # log.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "serve_app.documents.program", known.extension,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )  # fmt: skip
        try:
            out, _ = await asyncio.wait_for(process.communicate(data), self._seconds)
        except TimeoutError:
            return Converted(error=f"it can't be converted within {self._seconds:g} seconds")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        kind, text = out[:1], out[1:].decode(errors="replace")
        if kind == TEXT:
            return Converted(text)
        if kind == ERROR:
            return Converted(error=text)
        return Converted(error=f"it can't be converted within {MEMORY_BYTES >> 20} MiB of memory, or is damaged")
