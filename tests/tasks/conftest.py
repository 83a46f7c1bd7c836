"""Gateways without workers: their HTTP application in this process, with models and calls of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import hash_key
from serve_app.tasks.work import Settled
from tests.conftest import share_weights

KEY = "a key of this test alone"
ACCOUNT = "/client/v4/accounts/local/ai"


class Served:
    """A gateway, its HTTP client, and everything that was settled."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http
        self.settled: list[Settled] = []
        gateway.settlement.subscribers.append(self.settled.append)

    @property
    def endings(self) -> list[tuple[str, str]]:
        """Task and status of each settled piece of work."""
        return [(settled.task, settled.status) for settled in self.settled]


Serve = Callable[..., AbstractAsyncContextManager[Served]]


async def nobody(*_: Any) -> Any:
    raise AssertionError("no worker was to be called")


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """``serve(call, **settings)``: a gateway whose every model is ready and whose workers are ``call``."""

    @asynccontextmanager
    async def serving(call: Callable[..., Awaitable[Any]] = nobody, **settings: Any) -> AsyncIterator[Served]:
        share_weights(tmp_path)
        fields = {"account": "local", "cluster_secret": "s", "home": str(tmp_path), "profile": "local", **settings}
        gateway = Gateway(GatewaySettings(key_hashes=(hash_key(KEY),), **fields), call)
        for model in gateway.models:
            model.ready = True
        await gateway.inbox.start()
        transport = httpx.ASGITransport(build_http(gateway))
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers) as client:
            yield Served(gateway, client)
        await gateway.inbox.aclose()
        gateway.state.close()

    return serving


@pytest.fixture
def record(tmp_path: Path) -> Callable[[str], str]:
    """``record(task)``: the id of a model of that task, whose weights are an empty folder."""

    def written(task: str, stage: str) -> str:
        folder = tmp_path / "models"
        (folder / "weights").mkdir(parents=True, exist_ok=True)
        model = f"@cf/test/{task}"
        (folder / f"{task}.yaml").write_text(
            f'id: "{model}"\ntask: {task}\ndescription: Of a test.\ncreated_at: "2026-01-02"\n'
            f"weights: {{path: weights}}\nprice: {{input: 11.0, output: 11.0}}\nserving: {{local: {{{stage}: {{}}}}}}\n"
        )
        return model

    return written
