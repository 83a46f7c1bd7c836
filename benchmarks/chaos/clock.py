"""A wall clock that jumps, for the processes of one server (``clock.c``), without root and for nobody else.

The machine's own clock belongs to root. A time namespace moves the monotonic clocks only. libfaketime (0.9.10) either
takes the monotonic clock along, which no real jump does, or breaks CPython's ``time.sleep``.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
# Says whether the wall clock has been moved, and whether waiting has stayed as long as it was.
PROBE = """
import threading, time
before = time.monotonic()
threading.Event().wait(0.05)
condition = threading.Condition()
with condition:
    condition.wait(0.05)
time.sleep(0.05)
print(time.time(), time.monotonic() - before)
"""
PROBE_JUMP_S, PROBE_PATIENCE_S = 86400.0, 30.0


class Clock:
    """Moves the wall clock that the Python processes with :attr:`environment` see; ``folder`` must outlive them."""

    def __init__(self, folder: Path) -> None:
        """Compiles it. Raises :class:`OSError` where that fails, or where it does not move the clock alone."""
        self._library, self._file = folder / "clock.so", folder / "clock"
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise OSError("no C compiler")
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", self._library, SOURCE, "-ldl", "-lm", "-pthread"]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise OSError(f"{compiler}: {made.stderr[-300:]}")
        self._file.write_bytes(struct.pack("d", 0.0))
        with self._file.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 8)
        self._probe()

    @property
    def environment(self) -> dict[str, str]:
        libraries = [str(self._library), os.environ.get("LD_PRELOAD", "")]
        return {"LD_PRELOAD": ":".join(filter(None, libraries)), "CHAOS_CLOCK": str(self._file)}

    def jump(self, seconds: float) -> None:
        """Moves it to ``seconds`` ahead of the machine's, or behind it; 0 moves it back."""
        self._mapped[:8] = struct.pack("d", seconds)

    def _probe(self) -> None:
        self.jump(PROBE_JUMP_S)
        try:
            done = subprocess.run(
                [sys.executable, "-c", PROBE], env={**os.environ, **self.environment}, capture_output=True, text=True,
                timeout=PROBE_PATIENCE_S, check=True,
            )  # fmt: skip
            now, took = map(float, done.stdout.split())
        except (subprocess.SubprocessError, ValueError) as error:
            raise OSError(f"Python does not run with it: {error}") from error
        finally:
            self.jump(0.0)
        if not PROBE_JUMP_S - PROBE_PATIENCE_S < now - time.time() < PROBE_JUMP_S + PROBE_PATIENCE_S:
            raise OSError("this Python reads its clock in another way")
        if took < 0.15:
            raise OSError("this Python waits by the wall clock")
