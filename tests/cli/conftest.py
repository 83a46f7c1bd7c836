"""The program against a gateway's HTTP application in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.cli import main
from serve_app.client.server import Server
from serve_app.tasks.backend import Prepared
from serve_app.tasks.model import ServedModel
from tests.tasks.conftest import KEY, Served, record, serve  # noqa: F401
from tests.tasks.test_backend import EchoBackend


class Bridge(httpx.BaseTransport):
    """Brings what a thread asks to an application on an event loop."""

    def __init__(self, app: httpx.ASGITransport, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()

        async def ask() -> tuple[int, httpx.Headers, bytes]:
            sent = httpx.Request(request.method, request.url, headers=request.headers, content=body)
            answer = await self._app.handle_async_request(sent)
            return answer.status_code, answer.headers, await answer.aread()

        status, headers, content = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(60)
        return httpx.Response(status, headers=headers, content=content)


class Remembering(EchoBackend):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list = []

    async def prepare(self, model: ServedModel, request, salt: bytes) -> Prepared:
        self.asked.append(request)
        return await super().prepare(model, request, salt)


def connected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every command find the gateway."""
    transport = Bridge(served.http._transport, asyncio.get_running_loop())
    headers = {"Authorization": f"Bearer {KEY}"}

    def connect(home: object = None) -> Server:
        return Server(httpx.Client(transport=transport, base_url="http://here", headers=headers), "local")

    monkeypatch.setattr(Server, "connect", staticmethod(connect))


@pytest.fixture
async def echo(serve, record, monkeypatch) -> AsyncIterator[Served]:  # noqa: F811
    """A gateway whose model says what it is told."""
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.model = model
        served.backend = served.gateway.backends[model] = Remembering()
        connected(served, monkeypatch)
        yield served


@pytest.fixture
def shell(capsys):
    """``shell(*words, status=0)``: what the program prints, and to standard error."""

    async def run(*words: str, status: int = 0) -> tuple[str, str]:
        assert await asyncio.to_thread(main, list(words)) == status, capsys.readouterr()
        told = capsys.readouterr()
        return told.out, told.err

    return run
