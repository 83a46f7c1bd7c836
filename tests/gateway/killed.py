"""A gateway in a process of its own, whose model says what it is told: ``python -m tests.gateway.killed HOME PORT``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from serve_app.api.types import Event
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import hash_key
from serve_app.state.spending import ledger_writer
from serve_app.tasks.backend import Prepared
from serve_app.tasks.work import Work
from tests.tasks.conftest import KEY, nobody
from tests.tasks.test_backend import EchoBackend
from tests.tasks.test_settle import CHAT


class Slow(EchoBackend):
    """Takes its time, so that there is always something under way."""

    async def events(self, prepared: Prepared, work: Work) -> AsyncIterator[Event]:
        async for event in super().events(prepared, work):
            await asyncio.sleep(0.002)
            yield event


async def main(home: str, port: int) -> None:
    fields: dict[str, Any] = {"account": "local", "cluster_secret": "s", "home": home, "profile": "local"}
    # Its streams are short.
    ledger_writer.OPEN_S = 0.003
    gateway = Gateway(GatewaySettings(key_hashes=(hash_key(KEY),), models=(CHAT,), **fields), nobody)
    gateway.backends[CHAT] = Slow()
    for model in gateway.models:
        model.ready = True
    await gateway.state.start()
    gateway.streams.start()
    await uvicorn.Server(uvicorn.Config(build_http(gateway), port=port, log_level="error")).serve()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
