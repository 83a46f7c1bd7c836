"""The engine's side of a gateway, and models that take files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.types import GenerateRequest
from serve_app.catalog.load import load_catalog
from serve_app.channel.inbox import TokenInbox
from serve_app.gateway.backends.engine import EngineBackend
from serve_app.sampling_params import SamplingParams
from serve_app.tasks.model import ServedModel


def served(path: Path, **properties: bool) -> ServedModel:
    """The chat model's record with the weights of ``path``, and what these can do."""
    record = load_catalog()["@cf/pico/pico-instruct"]
    able = record.model_copy(update={
        "weights": record.weights.model_copy(update={"path": str(path)}),
        "properties": record.properties.model_copy(update=properties),
    })  # fmt: skip
    return ServedModel(able, record.serving["local"], path, Path("/nonexistent"))


def question(parts: list[dict[str, Any]]) -> GenerateRequest:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    return GenerateRequest(model="", messages=messages, prompt=None, raw=False, sampling=SamplingParams(max_tokens=4))


@pytest.fixture(scope="module")
def backend() -> Iterator[EngineBackend]:
    found = EngineBackend(TokenInbox(), None)
    yield found
    found.close()
