"""`serve-app top` and the chat of `serve-app run` at a real terminal, a pty, against a gateway that listens."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn

from benchmarks import ROOT
from serve_app.gateway.http.app import build_http
from tests.tasks.conftest import Served, record, serve  # noqa: F401
from tests.tasks.test_backend import EchoBackend

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")
PATIENCE_S = 60.0


class Slow(EchoBackend):
    """Comes to no end behind the word `forever`."""

    async def events(self, prepared, work):
        async for event in super().events(prepared, work):
            yield event
            if getattr(event, "text", "").strip() == "forever":
                await asyncio.Event().wait()


class Terminal:
    """One program at a terminal of 120 columns."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.side, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.before = termios.tcgetattr(self.side)
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", "HOME": "/nonexistent"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli", *words],
            stdin=inner, stdout=inner, stderr=inner, env=variables | environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inner)
        self.raw = ""
        os.set_blocking(self.side, False)

    @property
    def text(self) -> str:
        """Everything that was shown, without what moves the cursor."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    async def shows(self, *wanted: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not all(each in self.text for each in wanted):
            assert time.monotonic() < end and self.process.poll() is None, f"{wanted} is not in:\n{self.text[-3000:]}"
            self.read()
            await asyncio.sleep(0.02)

    def read(self) -> None:
        try:
            while got := os.read(self.side, 65536):
                self.raw += got.decode(errors="replace")
        except (BlockingIOError, OSError):
            pass  # nothing more for now, or the program has ended

    def press(self, keys: str) -> None:
        os.write(self.side, keys.encode())

    async def ended(self) -> int:
        status = await asyncio.to_thread(self.process.wait, PATIENCE_S)
        self.read()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.side)


@pytest.fixture
async def listening(serve, record, tmp_path: Path) -> AsyncIterator[tuple[Served, dict[str, str]]]:  # noqa: F811
    """A gateway on a port of its own, and the environment in which programs find it."""
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.model, served.gateway.backends[model] = model, Slow()
        await served.gateway.state.start()
        body = {"name": "x", "scopes": ["inference", "read", "admin"]}
        key = (await served.http.post("/client/v4/accounts/local/tokens", json=body)).json()["result"]["value"]
        config = uvicorn.Config(build_http(served.gateway), "127.0.0.1", 0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield served, {"SERVE_APP_HOME": str(tmp_path), "PORT": str(port), "SERVE_APP_API_KEY": key}
        server.should_exit = True
        await task


@pytest.mark.slow  # two programs start
async def test_top_and_a_chat(listening) -> None:
    """Both at once: a start of Python is what takes the time."""
    served, environment = listening
    top, chat = Terminal("top", "--every", "0.1", **environment), Terminal("run", served.model, **environment)
    try:
        await top.shows("serve-app top", "q ends", served.model, "tokens/s")
        assert "\x1b[?1049h" in top.raw  # a screen of its own
        top.press("q")
        assert await top.ended() == 0
        assert "\x1b[?1049l" in top.raw and "Traceback" not in top.text
        # Echo and lines are as they were.
        assert termios.tcgetattr(top.side)[3] == top.before[3]

        await chat.shows("/help lists commands", ">>> ")
        chat.press("one two three\r")
        await chat.shows("one two three\none two three\n")
        # Ctrl-C ends the answer, and not the chat.
        chat.press("on and on forever and ever\r")
        await chat.shows("ever\non and on forever")
        chat.press("\x03")
        await chat.shows("(stopped)")
        assert "forever and ever\non and on forever and" not in chat.text
        chat.press("four\r")
        await chat.shows("four\nfour\n")
        chat.press("\x04")
        assert await chat.ended() == 0 and "Traceback" not in chat.text
    finally:
        top.close()
        chat.close()
