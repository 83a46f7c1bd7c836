"""Asks the process that decodes, and ends it when it takes too long; the next file has another."""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.media.errors import BadFile
from serve_app.media.limits import AUDIO_S, IMAGE_S, MEMORY_BYTES, SAMPLE_RATE

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
# Processes, and so files that are decoded at the same time.
PROCESSES = 4
# How often who waits for a process looks whether it is to stop.
LOOK_S = 0.1
# Set where nobody wants what is being decoded any more, or its place is needed.
interrupted: ContextVar[threading.Event | None] = ContextVar("interrupted", default=None)


class Interrupted(Exception):
    """The file was given up because :data:`interrupted` was set; its process has ended."""


@dataclass(slots=True, frozen=True)
class Sound:
    """``samples``: int16, one channel, `SAMPLE_RATE` per second. They lie in a file, since hours of them are large."""

    samples: npt.NDArray[np.int16]

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE

    @property
    def milliseconds(self) -> int:
        return -(-len(self.samples) * 1000 // SAMPLE_RATE)


class Decoder:
    """Decodes files of clients. Its methods block, from any thread; files beyond `PROCESSES` wait for their turn.

    Processes are started when they are first needed, and end with this one.
    """

    def __init__(self, image_s: float = IMAGE_S, audio_s: float = AUDIO_S) -> None:
        self._seconds = {"image": image_s, "mask": image_s, "size": image_s, "audio": audio_s, "length": audio_s}
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(None)

    def image(self, data: bytes) -> npt.NDArray[np.uint8]:
        """RGB pixels [height, width, 3]. Raises :class:`BadFile`."""
        told, raw = self._decode("image", data)
        return raw.view(np.uint8)[: told["height"] * told["width"] * 3].reshape(told["height"], told["width"], 3)

    def mask(self, data: bytes) -> npt.NDArray[np.uint8]:
        """Pixels [height, width]: 255 for those that are transparent, or white where none is. Raises
        :class:`BadFile`.
        """
        told, raw = self._decode("mask", data)
        return raw.view(np.uint8)[: told["height"] * told["width"]].reshape(told["height"], told["width"])

    def size(self, data: bytes) -> tuple[int, int]:
        """Width and height of a picture that can be decoded. Raises :class:`BadFile`."""
        told, _ = self._decode("size", data)
        return told["width"], told["height"]

    def sound(self, data: bytes) -> Sound:
        """Raises :class:`BadFile`."""
        told, raw = self._decode("audio", data)
        return Sound(raw.view(np.int16)[: told["samples"]])

    def length(self, data: bytes, most_s: float) -> int:
        """Samples of a sound that can be decoded and has no more than ``most_s`` seconds. Raises :class:`BadFile`."""
        told, _ = self._decode("length", data, most_s)
        return int(told["samples"])

    def close(self) -> None:
        for _ in range(PROCESSES):
            if (process := self._idle.get()) is not None:
                process.end()
            self._idle.put(None)

    def _decode(
        self, kind: str, data: bytes, most_s: float | None = None
    ) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        process = self._idle.get()
        try:
            handle, out = _scratch()
        except OSError:
            self._idle.put(process)
            raise
        try:
            told, killed = None, 0
            while told is None:
                fresh, process = process is None, process or _Process()
                try:
                    told = process.ask(kind, data, out, self._seconds[kind], most_s)
                except Interrupted:
                    process.end()
                    process = None
                    raise
                except _Lost as lost:
                    process.end()
                    process = None
                    # One that has decoded others may have ended for what they took of its bounds; and somebody else
                    # may have killed a new one.
                    killed += fresh and lost.killed
                    if not lost.ended or (fresh and (killed > 1 or not lost.killed)):
                        raise BadFile(str(lost)) from None
            if "error" in told:
                raise BadFile(told["error"])
            if "failed" in told:
                raise OSError(told["failed"])
            return told, _NOTHING if kind in ("size", "length") else _mapped(handle)
        finally:
            os.close(handle)
            if not out.startswith(_HANDLES):
                os.unlink(out)
            self._idle.put(process)


_NOTHING = np.zeros(0, np.uint8)
_HANDLES = "/proc/"


def _scratch() -> tuple[int, str]:
    """A file, and where a process of this user opens it: one without a name where that can be had, so that nothing of
    it stays if this process is killed.
    """
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system that has no such files
            handle = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            return handle, f"{_HANDLES}{os.getpid()}/fd/{handle}"
    return tempfile.mkstemp(prefix="decoded-")


def _mapped(handle: int) -> npt.NDArray[np.uint8]:
    """The file's bytes; they stay as long as the array does."""
    size = os.fstat(handle).st_size
    return np.frombuffer(mmap.mmap(handle, size, prot=mmap.PROT_READ), np.uint8)


# Of this process's environment, which holds keys and the database's password. The last names the server's folder, by
# which what a killed server leaves behind is found.
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")


class _Lost(RuntimeError):
    """The process has to go, or is gone already (``ended``), maybe since somebody else has ``killed`` it; the text is
    for the client.
    """

    def __init__(self, text: str, *, ended: bool = False, killed: bool = False) -> None:
        super().__init__(text)
        self.ended, self.killed = ended, killed


_LONG = "it takes far more processor time to decode than good files of its size do; save it anew"


class _Process:
    def __init__(self) -> None:
        # What it needs is on the same path as what this process has loaded.
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "serve_app.media.program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )

    def ask(self, kind: str, data: bytes, out: str, seconds: float, most_s: float | None = None) -> dict[str, Any]:
        until = time.monotonic() + seconds
        asked = json.dumps({"kind": kind, "size": len(data), "out": out, "most_s": most_s}).encode() + b"\n"
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._send(asked, until)
            self._send(data, until)
            while not line.endswith(b"\n"):
                self._await(self._process.stdout.fileno(), until, write=False)
                piece = self._process.stdout.read(65536)
                if not piece:
                    raise BrokenPipeError
                line += piece
        except BrokenPipeError:
            ended = self._ended()
            if ended == -signal.SIGPROF:
                log.warning("a process that decodes has ended: a file took more processor time than it is allowed")
                raise _Lost(_LONG) from None
            log.warning("a process that decoded a file has ended")
            text = f"it can't be decoded within {MEMORY_BYTES >> 20} MiB of memory, or is damaged"
            raise _Lost(text, ended=True, killed=ended == -signal.SIGKILL) from None
        except TimeoutError:
            log.warning("a process that decodes is ended: it took longer than %g s", seconds)
            raise _Lost(f"it can't be decoded within {seconds:g} seconds") from None
        return dict(json.loads(line))

    def _ended(self) -> int | None:
        """How it has; None: it has not."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0)
        return None

    def _send(self, data: bytes, until: float) -> None:
        assert self._process.stdin is not None
        handle, view = self._process.stdin.fileno(), memoryview(data)
        os.set_blocking(handle, False)
        while view:
            self._await(handle, until, write=True)
            view = view[os.write(handle, view) :]

    def _await(self, handle: int, until: float, *, write: bool) -> None:
        poll = select.poll()
        poll.register(handle, select.POLLOUT if write else select.POLLIN)
        stop = interrupted.get()
        while True:
            left = max(0.0, until - time.monotonic())
            wait = left if stop is None else min(left, LOOK_S)
            if poll.poll(wait * 1000):
                return
            if stop is not None and stop.is_set():
                raise Interrupted
            if wait == left:
                raise TimeoutError

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
