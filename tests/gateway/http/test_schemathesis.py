"""Schemathesis against our OpenAPI document: no server error, no status or answer that the document does not have.

The quick run takes each operation once, wherever else it is served as well; the slow one takes every path, with more
examples. Workers are not here: what reaches them is refused as it is by full ones; `tests/e2e` has them.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from serve_app.api.errors import OutOfCapacity
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http, endpoints
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import hash_key
from tests.conftest import share_weights

KEY = "a key of this test alone"
UNCHECKED = list(HealthCheck)
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
EVERY = [(e.method, e.path.replace(":path}", "}"), e.about.summary) for e in endpoints(None)]  # type: ignore[arg-type]
ONCE = list({summary: (method, path, summary) for method, path, summary in reversed(EVERY)}.values())


async def nobody(*_: Any) -> Any:
    raise OutOfCapacity


@pytest.fixture(scope="module")
def schema():
    with tempfile.TemporaryDirectory() as home:
        share_weights(Path(home))
        settings = GatewaySettings(
            account="local", key_hashes=(hash_key(KEY),), cluster_secret="s", home=home, profile="local"
        )
        gateway = Gateway(settings, nobody)
        for model in gateway.models:
            model.ready = True
        # The test transport has a loop of its own per request; the inbox listens in one that stays.
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(gateway.inbox.start(), loop).result()
        app = build_http(gateway)
        yield schemathesis.openapi.from_asgi("/openapi.json", app)
        asyncio.run_coroutine_threadsafe(gateway.inbox.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        gateway.state.close()


def hold(schema: Any, method: str, path: str, examples: int, modes: tuple[GenerationMode, ...]) -> None:
    operation = schema[path][method]
    for mode in modes:

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, headers={"Authorization": f"Bearer {KEY}"})

        check()


@pytest.mark.parametrize(("method", "path", "summary"), ONCE, ids=[s for _, _, s in ONCE])
def test_operations_once(schema, method, path, summary):
    hold(schema, method, path, 2, (GenerationMode.POSITIVE,))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "summary"), EVERY, ids=[f"{m} {p}" for m, p, _ in EVERY])
def test_every_path(schema, method, path, summary):
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    hold(schema, method, path, 60, modes if method == "POST" else modes[:1])
