"""Adapters on the running server: from upload to the first token, of two accounts, deleted while they run."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from serve_app.adapters.shapes import base_of
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.state.store.sql import SqlStore
from tests.e2e.conftest import CHAT

FOLDER = PROJECT_ROOT / "checkpoints" / "pico-instruct"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ASKED = {"prompt": "What does len do?", "temperature": 0, "max_tokens": 24}


def files(stack: Any, seed: int) -> dict[str, bytes]:
    """An adapter of random numbers that are large enough to change every answer."""
    base, draw = base_of(FOLDER, stack.home), torch.Generator().manual_seed(seed)
    linears = {name: shape for name, shape in base.linears.items() if name.endswith(("q_proj", "v_proj", "o_proj"))}
    tensors = {}
    for name, (out, into) in linears.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, into, generator=draw)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, 4, generator=draw) * 0.05
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": sorted({n.split(".")[-1] for n in linears}),
    }
    return {CONFIG: json.dumps(config).encode(), WEIGHTS: save(tensors)}


def upload(client: httpx.Client, made: dict[str, bytes], name: str) -> dict[str, Any]:
    answer = client.post("/finetunes", json={"model": CHAT, "name": name})
    assert answer.status_code == 200, answer.text
    for file, data in made.items():
        form = {"files": {"file": ("blob", data, "application/octet-stream")}, "data": {"file_name": file}}
        answer = client.post(f"/finetunes/{name}/finetune-assets", **form)
        assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def said(client: httpx.Client, **more: Any) -> str:
    answer = client.post(f"/run/{CHAT}", json={**ASKED, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]["response"]


@pytest.fixture(scope="module")
def others(stack: Any) -> Iterator[httpx.Client]:
    """The client of another account."""
    name = f"lora-{uuid.uuid4().hex[:8]}"
    with SqlStore(stack.home) as store:
        key = store.accounts.add(name)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{stack.url}/client/v4/accounts/{name}/ai", headers=headers, timeout=120) as client:
        until = time.monotonic() + 120
        while client.get("/finetunes").status_code != 200 and time.monotonic() < until:
            time.sleep(0.1)
        yield client


def test_two_accounts_use_adapters_of_one_name_as_soon_as_they_are_there(stack, http, others):
    name = f"tone-{uuid.uuid4().hex[:8]}"
    base = said(http)
    mine = upload(http, files(stack, 1), name)
    first = said(http, lora=name)
    theirs = upload(others, files(stack, 2), name)
    assert mine["digest"] != theirs["digest"]
    second = said(others, lora=name)
    assert len({base, first, second}) == 3
    # Again, from the caches of each; and by the other ways to name it.
    assert said(http, lora=mine["id"]) == first and said(others, lora=theirs["id"]) == second
    assert said(http) == said(others) == base
    assert others.post(f"/run/{CHAT}", json={**ASKED, "lora": mine["id"]}).status_code == 404
    chat = {"model": f"{CHAT}@{name}", "prompt": ASKED["prompt"], "temperature": 0, "max_tokens": 24}
    raw = said(http, lora=name, raw=True)
    assert http.post("/v1/completions", json=chat).json()["choices"][0]["text"] == raw
    listed = http.get("/v1/models").json()["data"]
    assert f"{CHAT}@{name}" in {each["id"] for each in listed}
    # A new version is another adapter, and the one before stays as it was until then.
    assert http.post(f"/finetunes/{name}/versions").status_code == 200
    assert said(http, lora=name) == first
    for file, data in files(stack, 2).items():
        form = {"files": {"file": ("blob", data)}, "data": {"file_name": file}}
        assert http.post(f"/finetunes/{name}/finetune-assets", **form).status_code == 200
    assert said(http, lora=name) == second


def test_one_that_is_deleted_while_it_runs_answers_to_the_end(stack, http):
    name = f"gone-{uuid.uuid4().hex[:8]}"
    upload(http, files(stack, 3), name)
    asked = {**ASKED, "max_tokens": 200, "min_tokens": 200, "lora": name}
    whole = said(http, **{**asked, "lora": name})
    text, deleted = "", False
    with http.stream("POST", f"/run/{CHAT}", json={**asked, "stream": True}) as answer:
        for line in answer.iter_lines():
            if not deleted:
                deleted = http.delete(f"/finetunes/{name}").status_code == 200
            if line.startswith("data: {"):
                text += json.loads(line[6:])["response"]
    assert deleted and text == whole
    missing = http.post(f"/run/{CHAT}", json={**ASKED, "lora": name})
    assert (missing.status_code, missing.json()["errors"][0]["code"]) == (404, 3037)


def test_an_adapter_that_nobody_knows_is_not_found(http):
    missing = http.post(f"/run/{CHAT}", json={**ASKED, "lora": "nobody"})
    assert (missing.status_code, missing.json()["errors"][0]["code"]) == (404, 3037)
    streamed = http.post(f"/run/{CHAT}", json={**ASKED, "lora": "nobody", "stream": True})
    assert streamed.status_code == 404
