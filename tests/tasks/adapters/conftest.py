"""A gateway with a model that takes adapters."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from serve_app.adapters import shapes
from tests.adapters import test_check as files
from tests.tasks.adapters.tuned import (
    AdaptingBackend,
)


@pytest.fixture
async def tuned(serve, record, tmp_path: Path):
    """A model that takes adapters, ``served.model``, and one that does not, both answered by an echo."""
    model = record("text-generation", "decode")
    folder = tmp_path / "models"
    plain = (folder / "text-generation.yaml").read_text()
    (folder / "plain.yaml").write_text(plain.replace(model, "@cf/test/plain"))
    (folder / "text-generation.yaml").write_text(plain + "lora: {price: {input: 22.0, output: 22.0}}\n")
    for name, text in (("config.json", "{}"), ("model.safetensors", "")):
        (folder / "weights" / name).write_text(text)
    base = {"linears": files.BASE.linears, "others": files.BASE.others, "kind": files.BASE.kind, "weights": {}}
    shapes.keep(base, folder / "weights", tmp_path)
    async with serve(models=(model, "@cf/test/plain"), lora_adapters=3, lora_file_bytes=100_000) as served:
        served.model, served.backend = model, AdaptingBackend()
        served.gateway.backends.update(dict.fromkeys((model, "@cf/test/plain"), served.backend))
        yield served
        served.gateway.adapters.close()


@pytest.fixture
async def others(tuned) -> httpx.AsyncClient:
    """The client of another account."""
    state = tuned.gateway.state
    key = await state.change(state.admin.add, "other")
    transport, headers = tuned.http._transport, {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers)
