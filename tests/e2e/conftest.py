"""Clients of the running stack."""

from __future__ import annotations

import json

import httpx
import pytest

from serve_app.catalog.load import PROJECT_ROOT

CHAT = "@cf/pico/pico-instruct"
EMBED = "@cf/sentence-transformers/all-minilm-l6-v2"
RERANK = "@cf/pico/pico-reranker"


def eos_id() -> str:
    """The id, as a JSON key, of the token with which the chat model ends."""
    generation = json.loads((PROJECT_ROOT / "checkpoints" / "pico-instruct" / "generation_config.json").read_text())
    end = generation["eos_token_id"]
    return str(end[0] if isinstance(end, list) else end)


@pytest.fixture(scope="session")
def http(stack):
    with httpx.Client(base_url=stack.api, headers=stack.headers, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def forget_handles():
    """Handles that this process keeps belong to the loop of the test that made them, which has ended."""
    from ray.serve import context

    yield
    if client := context._global_client:
        client.handle_cache.clear()


@pytest.fixture
def run(http):
    """``run(model, body)`` -> the result, after checking the envelope."""

    def call(model: str, body: dict) -> dict:
        answer = http.post(f"/run/{model}", json=body)
        assert answer.status_code == 200, answer.text
        envelope = answer.json()
        assert envelope["success"] is True and envelope["errors"] == []
        return envelope["result"]

    return call
