"""Servers that give wrong answers: no benchmark may make a figure of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from benchmarks.engine import checkpoint
from benchmarks.serving import stack


@dataclass(slots=True)
class Liar:
    """Answers every POST and GET alike."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def checkpoint_here(monkeypatch) -> None:
    """Random models are written by this process, which has imported torch already."""

    def write(folder: Path, size: str) -> Path:
        assert checkpoint.main([str(folder), size]) == 0
        return folder

    monkeypatch.setattr(stack, "write_checkpoint", write)


@pytest.fixture
def liar() -> Iterator[Callable[[int, bytes], Liar]]:
    """``liar(status, body)`` starts one."""
    started: list[ThreadingHTTPServer] = []

    def start(status: int, body: bytes) -> Liar:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        started.append(server)
        return Liar(server.server_port)

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
