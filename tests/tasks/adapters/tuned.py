"""Fine-tunes that are uploaded and asked for, in a gateway without workers."""

from __future__ import annotations

import json
from typing import Any

import httpx

from serve_app.api.types import ModelLimits
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS
from serve_app.tasks.backend import Prepared
from tests.adapters import test_check as files
from tests.tasks.conftest import ACCOUNT, Served
from tests.tasks.test_backend import EchoBackend

TUNES = f"{ACCOUNT}/finetunes"
GOOD_CONFIG, GOOD_WEIGHTS = json.dumps(files.CONFIG).encode(), files.packed(files.weights())


def other_weights() -> bytes:
    return files.packed({name: tensor * 2 for name, tensor in files.weights().items()})


class AdaptingBackend(EchoBackend):
    """Remembers the adapter of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: list[Any] = []

    def limits(self, model: Any) -> ModelLimits:
        return ModelLimits(default_max_tokens=64, lora=model.record.adapters is not None)

    async def prepare(self, model: Any, request: Any, salt: bytes) -> Prepared:
        self.adapters.append(request.adapter)
        return await super().prepare(model, request, salt)


async def created(served: Served, name: str = "mine", **more: Any) -> httpx.Response:
    return await served.http.post(TUNES, json={"model": served.model, "name": name, **more})


async def sent(served: Served, which: str, name: str, data: bytes, **more: Any) -> httpx.Response:
    form = {"files": {"file": ("blob", data, "application/octet-stream")}, "data": {"file_name": name}, **more}
    return await served.http.post(f"{TUNES}/{which}/finetune-assets", **form)


async def ready(served: Served, name: str = "mine", weights: bytes = GOOD_WEIGHTS, **more: Any) -> dict[str, Any]:
    made = await created(served, name, **more)
    assert made.status_code == 200, made.text
    assert (await sent(served, name, CONFIG, GOOD_CONFIG)).status_code == 200
    done = await sent(served, name, WEIGHTS, weights)
    assert done.status_code == 200, done.text
    return done.json()["result"]


async def ask(served: Served, **more: Any) -> httpx.Response:
    return await served.http.post(f"{ACCOUNT}/run/{served.model}", json={"prompt": "one two", **more})


def code(response: httpx.Response) -> tuple[int, int]:
    return response.status_code, response.json()["errors"][0]["code"]
