"""Adapters in every dialect, in lists, estimates, batches and prices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.gateway.batches import Works
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS
from serve_app.state.deferred.batches import unpack
from tests.tasks.adapters.tuned import (
    GOOD_CONFIG,
    TUNES,
    ask,
    code,
    created,
    other_weights,
    ready,
    sent,
)
from tests.tasks.conftest import ACCOUNT
from tests.tasks.test_backend import TURN

QUEUED = {"queueRequest": "true"}


def dialects(model: str, lora: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Where the adapter is named by the field."""
    chat = {"model": model, "messages": TURN, "lora": lora}
    return {
        "native": (f"{ACCOUNT}/run/{model}", {"prompt": "one", "lora": lora}),
        "native raw": (f"{ACCOUNT}/run/{model}", {"prompt": "one", "raw": True, "lora": lora}),
        "native messages": (f"{ACCOUNT}/run/{model}", {"messages": TURN, "lora": lora}),
        "generic": (f"{ACCOUNT}/run", {"model": model, "input": {"prompt": "one", "lora": lora}}),
        "chat": ("/v1/chat/completions", chat),
        "stream": ("/v1/chat/completions", {**chat, "stream": True}),
        "completions": ("/v1/completions", {"model": model, "prompt": ["one", "two"], "lora": lora}),
        "responses": ("/v1/responses", {"model": model, "input": "one", "lora": lora}),
        "messages": ("/v1/messages", {**chat, "max_tokens": 8}),
        "ollama chat": ("/api/chat", chat),
        "ollama generate": ("/api/generate", {"model": model, "prompt": "one", "lora": lora}),
    }


@pytest.mark.parametrize("name", dialects("", ""))
async def test_every_dialect_knows_the_field_and_the_models_name(tuned, name):
    mine = await ready(tuned)
    plain, body = dialects(tuned.model, "")[name]
    without = {key: value for key, value in body.items() if key != "lora"}
    combined = f"{tuned.model}@mine"
    path, named = dialects(combined, "")[name]
    named = {key: value for key, value in named.items() if key != "lora"}
    for where, asked, expected in (
        (*dialects(tuned.model, "mine")[name], mine["id"]),
        (path, named, mine["id"]),
        (plain, without, None),
    ):
        answer = await tuned.http.post(where, json=asked)
        assert answer.status_code == 200, answer.text
        last = tuned.backend.adapters[-1]
        assert (None if last is None else last.id) == expected
    path, body = dialects(tuned.model, "nobody")[name]
    missing = await tuned.http.post(path, json=body)
    assert missing.status_code == 404 and "nobody" in missing.text
    path, body = dialects("@cf/test/plain", "mine")[name]
    refused = await tuned.http.post(path, json=body)
    assert refused.status_code == 405 and "LoRA" in refused.text
    path, body = dialects(f"{tuned.model}@mine", "another")[name]
    assert (await tuned.http.post(path, json=body)).status_code == 400


async def test_an_adapter_of_another_model_is_not_found(tuned):
    mine = await ready(tuned)
    table = tuned.gateway.state.adapters.store
    table.change("local", mine["id"], model="@cf/test/another")
    missing = await ask(tuned, lora="mine")
    assert code(missing) == (404, 3037) and "@cf/test/another" in missing.text


async def test_models_list_the_accounts_adapters_as_models(tuned, others):
    before = (await tuned.http.get("/v1/models")).json()["data"]
    await created(tuned, "waiting")
    await ready(tuned)
    name = f"{tuned.model}@mine"
    after = (await tuned.http.get("/v1/models")).json()["data"]
    assert {each["id"] for each in after} - {each["id"] for each in before} == {name}
    one = await tuned.http.get(f"/v1/models/{name}")
    assert one.json()["id"] == name and one.json()["object"] == "model"
    assert (await tuned.http.get(f"/v1/models/{tuned.model}@nobody")).status_code == 404
    assert name not in (await others.get("/v1/models")).text
    assert (await others.get(f"/v1/models/{name}")).status_code == 404


async def test_estimates_and_the_python_handle_know_adapters(tuned):
    mine = await ready(tuned)
    found = await tuned.http.post(f"{ACCOUNT}/estimate/{tuned.model}", json={"prompt": "one two", "lora": "mine"})
    assert found.status_code == 200 and tuned.backend.adapters[-1].id == mine["id"]
    missing = await tuned.http.post(f"{ACCOUNT}/estimate/{tuned.model}", json={"prompt": "one", "lora": "nobody"})
    assert missing.status_code == 404
    answer = await tuned.gateway.run_handle(tuned.model, {"prompt": "one two", "lora": "mine"})
    assert answer["result"]["response"] == "one two" and tuned.settled[-1].entry.adapter == mine["id"]
    answer = await tuned.gateway.run_handle(f"{tuned.model}@mine", {"prompt": "one two"})
    assert answer["success"] and tuned.backend.adapters[-1].id == mine["id"]
    answer = await tuned.gateway.run_handle(tuned.model, {"prompt": "one two", "lora": "nobody"})
    assert (answer["status"], answer["errors"][0]["code"]) == (404, 3037)


async def test_a_batch_takes_adapters(tuned):
    await ready(tuned)
    body = {"requests": [{"prompt": "one", "lora": "mine"}, {"prompt": "two"}]}
    batches = tuned.gateway.state.batches
    loras = []
    for model in (tuned.model, f"{tuned.model}@mine"):
        found = await tuned.http.post(f"{ACCOUNT}/run/{model}", params={"queueRequest": "true"}, json=body)
        assert found.status_code == 200, found.text
        for shard in batches.shards(found.json()["result"]["request_id"]):
            requests = unpack(tuned.gateway.state.files.get(shard.blob))
            loras += [json.loads(each.body).get("lora", "") for each in requests]
    assert sorted(loras) == ["", "mine", "mine", "mine"]


async def test_a_batch_goes_on_with_the_version_that_it_came_with_and_ends_without_it(tuned):
    first = await ready(tuned)
    model = tuned.gateway.models.find(tuned.model)
    model.ready = False  # nothing of a batch runs yet

    async def queued() -> str:
        body = {"requests": [{"prompt": "one", "lora": "mine"}, {"prompt": "two"}]}
        sent = await tuned.http.post(f"{ACCOUNT}/run/{tuned.model}", params=QUEUED, json=body)
        return sent.json()["result"]["request_id"]

    batches = [await queued()]
    await tuned.http.post(f"{TUNES}/mine/versions")
    await sent(tuned, "mine", CONFIG, GOOD_CONFIG)
    await sent(tuned, "mine", WEIGHTS, other_weights())
    batches.append(await queued())
    works = asyncio.ensure_future(Works(tuned.gateway).run())

    async def ended(batch: str) -> Any:
        while (found := (await tuned.http.get(f"{ACCOUNT}/batches/{batch}")).json()["result"])["ended_at"] is None:
            await asyncio.sleep(0.02)
        return found["requests"]

    try:
        model.ready = True
        async with asyncio.timeout(60):
            assert [(await ended(batch))["succeeded"] for batch in batches] == [2, 2]
        digests = [ref.digest for ref in tuned.backend.adapters if ref is not None]
        assert len(set(digests)) == len(digests) == 2 and first["digest"] in digests
        model.ready = False
        batches.append(await queued())
        await tuned.http.delete(f"{TUNES}/mine")
        model.ready = True
        async with asyncio.timeout(60):
            counts = await ended(batches[-1])
        assert (counts["succeeded"], counts["failed"]) == (1, 1)
        told = await tuned.http.post(f"{ACCOUNT}/run/{tuned.model}", json={"request_id": batches[-1]}, params=QUEUED)
        failed = [one for one in told.json()["result"]["responses"] if not one["success"]]
        assert [one["errors"][0]["code"] for one in failed] == [3037]
    finally:
        works.cancel()
        await asyncio.gather(works, return_exceptions=True)


async def test_a_batch_request_for_an_adapter_that_is_not_there_has_that_as_its_error(tuned):
    body = {"requests": [{"prompt": "one", "lora": "nobody"}, {"prompt": "two"}]}
    found = await tuned.http.post(f"{ACCOUNT}/run/{tuned.model}", params=QUEUED, json=body)
    batch = found.json()["result"]["request_id"]
    (result,) = tuned.gateway.state.batches.results(batch)
    assert (result.number, result.status) == (0, 404) and b"3037" in result.body


async def test_tokens_through_an_adapter_cost_what_the_record_says(tuned):
    await ready(tuned)
    plain = (await ask(tuned)).json()["result"]["usage"]
    with_adapter = (await ask(tuned, lora="mine")).json()["result"]["usage"]
    assert with_adapter["neurons"] == 2 * plain["neurons"] > 0
    estimate = f"{ACCOUNT}/estimate/{tuned.model}"
    told = [
        (await tuned.http.post(estimate, json={"prompt": "one two", **more})).json() for more in ({}, {"lora": "mine"})
    ]
    assert told[1]["result"]["neurons"]["most"] == 2 * told[0]["result"]["neurons"]["most"]
