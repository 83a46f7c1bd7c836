"""Whole lives of batches through unmodified client libraries: a gateway's HTTP application, and a runner beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import httpx2
import orjson
import pytest
from anthropic import AsyncAnthropic
from cloudflare import AsyncCloudflare
from openai import AsyncOpenAI

from serve_app.gateway.batches import Works
from tests.tasks.conftest import ACCOUNT, KEY
from tests.tasks.test_backend import TURN, EchoBackend
from tests.variants import some

CHATS = "/v1/chat/completions"


@pytest.fixture
async def echo(serve, record):
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.model = model
        served.backend = served.gateway.backends[model] = EchoBackend()
        await served.gateway.state.start()
        running = asyncio.ensure_future(Works(served.gateway).run())
        yield served
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Slow(EchoBackend):
    """Never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def events(self, prepared: Any, work: Any) -> Any:
        self.begun.set()
        await asyncio.sleep(600)
        async for event in super().events(prepared, work):
            yield event


def anthropic_transport(echo: Any) -> dict[str, Any]:
    """Anthropic's library has an HTTP client of its own."""
    return {"http_client": httpx2.AsyncClient(transport=httpx2.ASGITransport(echo.http._transport.app))}


def transport(echo: Any) -> dict[str, Any]:
    return {"http_client": httpx.AsyncClient(transport=echo.http._transport)}


@pytest.fixture
async def cold(serve, record):
    """Without a runner: the one that is called does not come up."""
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.model = model
        served.backend = served.gateway.backends[model] = EchoBackend()
        await served.gateway.state.start()
        runners = served.gateway.runners
        runners.work = runners.nudge = lambda: asyncio.sleep(600)
        runners.here = lambda: Works(served.gateway, clients=True)
        runners.start()
        yield served
        runners.close()


@pytest.fixture(params=["cancelled", "expired"])
async def endless(request, serve, record):
    """Nothing ends by itself; ``how`` batches do."""
    model = record("text-generation", "decode")
    hours = 0.5 / 3600 if request.param == "expired" else 24.0
    async with serve(models=(model,), batch_hours=hours) as served:
        served.model, served.how = model, request.param
        served.gateway.backends[model] = Slow()
        await served.gateway.state.start()
        running = asyncio.ensure_future(Works(served.gateway).run())
        yield served
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(ask: Callable[[], Awaitable[Any]], over: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + 60.0
    while not over(found := await ask()):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.02)
    return found


class Counted(EchoBackend):
    """Takes its time, and counts what it has begun and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = self.ended = 0

    async def events(self, prepared: Any, work: Any) -> Any:
        self.begun += 1
        await asyncio.sleep(0.1)
        async for event in super().events(prepared, work):
            yield event
        self.ended += 1


async def test_a_gateway_ends_what_it_has_begun_and_begins_nothing_more(serve, record):
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        backend = served.gateway.backends[model] = Counted()
        await served.gateway.state.start()
        works = Works(served.gateway, clients=True)
        running = asyncio.ensure_future(works.run())
        client = AsyncCloudflare(api_token=KEY, base_url="http://here/client/v4", **transport(served))
        asked = {"requests": [{"prompt": str(number)} for number in range(20)]}
        queue = {"account_id": "local", "text": "", "extra_query": {"queueRequest": "true"}}
        await client.ai.run(model, **queue, extra_body=asked)
        works.wake()
        while not backend.begun:
            await asyncio.sleep(0.01)
        await works.drain()
        begun = backend.begun
        assert 0 < begun == backend.ended < 20
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # What it had begun has its results, and another begins behind them.
        running = asyncio.ensure_future(Works(served.gateway).run())
        while backend.ended < 20:
            await asyncio.sleep(0.01)
        assert backend.begun == 20
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_openais_sdk(echo):
    client = AsyncOpenAI(api_key=KEY, base_url="http://here/v1", **transport(echo))
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": CHATS, "body": {"model": echo.model, "messages": TURN, **more}}
        for i, more in enumerate([{}, {"temperature": 9}, {"n": 2}])
    ]
    data = b"\n".join(orjson.dumps(row) for row in rows)
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (await client.files.content(file.id)).content == data
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata={"a": "b"}
    )
    assert batch.status == "validating"
    batch = await until(lambda: client.batches.retrieve(batch.id), lambda b: b.completed_at is not None)
    assert batch.status == "completed" and batch.in_progress_at and batch.finalizing_at and batch.metadata == {"a": "b"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert batch.usage.output_tokens > 0 and batch.model_extra["neurons"] > 0
    output = [orjson.loads(line) for line in (await client.files.content(batch.output_file_id)).content.splitlines()]
    assert [line["custom_id"] for line in output] == ["r0", "r2"]
    assert len(output[1]["response"]["body"]["choices"]) == 2 and output[0]["response"]["status_code"] == 200
    (error,) = (await client.files.content(batch.error_file_id)).content.splitlines()
    told = orjson.loads(error)
    assert told["custom_id"] == "r1" and told["response"]["body"]["error"]["param"] == "temperature"
    kinds = {f.id: f.purpose for f in [f async for f in client.files.list()]}
    assert kinds == {file.id: "batch", batch.output_file_id: "batch_output", batch.error_file_id: "batch_output"}
    assert [b.id async for b in client.batches.list(limit=1)] == [batch.id]
    assert (await client.files.delete(batch.error_file_id)).deleted


async def test_a_file_that_is_wrong_behind_its_beginning_fails_with_its_lines(echo, monkeypatch):
    monkeypatch.setattr("serve_app.gateway.http.routes.deferred.openai_batches.FIRST_BYTES", 200)
    client = AsyncOpenAI(api_key=KEY, base_url="http://here/v1", **transport(echo))
    row = {"method": "POST", "url": CHATS, "body": {"model": echo.model, "messages": TURN}}
    rows = [orjson.dumps({"custom_id": name, **row}) for name in "abca"]
    file = await client.files.create(file=("in.jsonl", b"\n".join([*rows, b"{"])), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
    batch = await until(lambda: client.batches.retrieve(batch.id), lambda b: b.failed_at is not None)
    assert batch.status == "failed"
    assert [(e.code, e.line) for e in batch.errors.data] == [("invalid_json_line", 5), ("duplicate_custom_id", 4)]
    assert not echo.settled


@pytest.mark.parametrize("large", some([False, True], True))
async def test_anthropics_sdk(echo, monkeypatch, large):
    if large:
        monkeypatch.setattr("serve_app.gateway.http.routes.deferred.anthropic_batches.INLINE_BYTES", 100)
    client = AsyncAnthropic(api_key=KEY, base_url="http://here", **anthropic_transport(echo))
    params = {"model": echo.model, "max_tokens": 9, "messages": TURN}
    asked = [{"custom_id": "good", "params": params}, {"custom_id": "bad", "params": {**params, "temperature": 9}}]
    batch = await client.messages.batches.create(requests=asked)
    assert batch.processing_status == "in_progress"
    batch = await until(lambda: client.messages.batches.retrieve(batch.id), lambda b: b.processing_status == "ended")
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    found = {one.custom_id: one.result async for one in await client.messages.batches.results(batch.id)}
    assert found["good"].message.content[0].text == TURN[-1]["content"]
    assert found["bad"].type == "errored" and "temperature" in found["bad"].error.error.message
    assert [b.id async for b in client.messages.batches.list()] == [batch.id]
    assert (await client.messages.batches.delete(batch.id)).id == batch.id
    assert [b.id async for b in client.messages.batches.list()] == []
    assert not echo.gateway.state.files.list("batches/")


async def test_cloudflares_sdk(echo):
    client = AsyncCloudflare(api_token=KEY, base_url="http://here/client/v4", **transport(echo))
    asked = [{"prompt": "one two", "external_reference": "a"}, {"prompt": "three", "temperature": 9}, {"prompt": "x"}]

    async def run(body: dict[str, Any], **query: str) -> Any:
        return await client.ai.run(echo.model, account_id="local", text="", extra_body=body, extra_query=query)

    queued = await run({"requests": asked}, queueRequest="true")
    assert queued["status"] == "queued" and queued["model"] == echo.model
    request_id = queued["request_id"]
    done = await until(lambda: run({"request_id": request_id}), lambda told: "responses" in told)
    told = {one["id"]: one for one in done["responses"]}
    assert [(told[i]["success"], told[i]["external_reference"]) for i in range(3)] == [
        (True, "a"), (False, None), (True, None)
    ]  # fmt: skip
    assert told[0]["result"]["response"] == "one two" and told[1]["errors"][0]["code"] == 5006
    usage = done["usage"]
    assert usage["prompt_tokens"] == 3 and usage["completion_tokens"] == 3 and usage["total_tokens"] == 6
    # The receipt is the sum of the ledger's entries, to the last neuron.
    batch = (await echo.http.get(f"{ACCOUNT}/batches/{request_id}")).json()["result"]
    assert batch["status"] == "completed" and batch["progress"]["done"] == 3 and batch["progress"]["seconds_left"] == 0
    entries = [settled for settled in echo.settled if settled.status == "done"]
    micro = sum(settled.usage.micro_neurons for settled in entries)
    assert round(batch["neurons"] * 1e6) == round(usage["neurons"] * 1e6) == micro
    results = await echo.http.get(f"{ACCOUNT}/batches/{request_id}/results", headers={"Range": "bytes=0-9"})
    assert results.status_code == 206 and len(results.content) == 10
    events = (await echo.http.get(f"{ACCOUNT}/batches/{request_id}/events")).text
    assert events.startswith("event: completed\ndata: {") and events.endswith("data: [DONE]\n\n")
    # What did not succeed, once more.
    again = (await echo.http.post(f"{ACCOUNT}/batches/{request_id}/retry")).json()
    assert again["success"] is False and "request 0" in again["errors"][0]["message"]  # it is still wrong
    assert (await echo.http.delete(f"{ACCOUNT}/batches/{request_id}")).status_code == 200
    assert (await echo.http.get(f"{ACCOUNT}/batches/{request_id}")).status_code == 404


@pytest.mark.parametrize("door", some(["openai", "anthropic", "workers-ai"], "workers-ai"))
async def test_what_was_cancelled_is_run_by_a_retry(echo, door):
    """Of a batch whose model has no room."""
    next(iter(echo.gateway.models)).ready = False
    if door == "openai":
        row = {"custom_id": "r", "method": "POST", "url": CHATS, "body": {"model": echo.model, "messages": TURN}}
        sent = {"file": ("in.jsonl", orjson.dumps(row))}
        file = (await echo.http.post("/v1/files", files=sent, data={"purpose": "batch"})).json()["id"]
        asked = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
        made = (await echo.http.post("/v1/batches", json=asked)).json()["id"]
    elif door == "anthropic":
        params = {"model": echo.model, "max_tokens": 9, "messages": TURN}
        asked = {"requests": [{"custom_id": "r", "params": params}]}
        made = (await echo.http.post("/v1/messages/batches", json=asked)).json()["id"]
    else:
        asked = {"requests": [{"messages": TURN, "external_reference": "r"}]}
        told = await echo.http.post(f"{ACCOUNT}/run/{echo.model}?queueRequest=true", json=asked)
        assert told.status_code == 200, told.text
        made = told.json()["result"]["request_id"]

    async def state(batch: str) -> Any:
        return (await echo.http.get(f"{ACCOUNT}/batches/{batch}")).json()["result"]

    if door == "openai":
        await until(lambda: state(made), lambda b: b["status"] == "queued")
    await echo.http.post(f"{ACCOUNT}/batches/{made}/cancel")
    batch = await until(lambda: state(made), lambda b: b["ended_at"] is not None)
    assert batch["status"] == "cancelled" and batch["requests"]["cancelled"] == 1
    next(iter(echo.gateway.models)).ready = True
    again = (await echo.http.post(f"{ACCOUNT}/batches/{made}/retry")).json()["result"]
    assert again["id"] != batch["id"] and again["door"] == door
    again = await until(lambda: state(again["id"]), lambda b: b["ended_at"] is not None)
    assert again["status"] == "completed" and again["requests"]["succeeded"] == 1


async def test_a_batch_is_begun_in_the_gateway_while_a_runner_starts(cold, monkeypatch):
    monkeypatch.setattr("serve_app.gateway.runners.BEGIN_S", 60.0)
    client = AsyncOpenAI(api_key=KEY, base_url="http://here/v1", **transport(cold))
    row = {"custom_id": "r", "method": "POST", "url": CHATS, "body": {"model": cold.model, "messages": TURN}}
    file = await client.files.create(file=("in.jsonl", orjson.dumps(row)), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
    assert batch.status == "validating"
    batch = await until(lambda: client.batches.retrieve(batch.id), lambda b: b.completed_at is not None)
    assert batch.request_counts.completed == 1
    asked = {"requests": [{"messages": TURN}]}
    told = await cold.http.post(f"{ACCOUNT}/run/{cold.model}?queueRequest=true", json=asked)
    made = told.json()["result"]["request_id"]

    async def state() -> Any:
        return (await cold.http.get(f"{ACCOUNT}/batches/{made}")).json()["result"]

    # What comes meanwhile is not left out.
    assert (await until(state, lambda b: b["ended_at"] is not None))["requests"]["succeeded"] == 1


async def test_what_the_gateway_has_begun_is_left_to_runners(cold, monkeypatch):
    monkeypatch.setattr("serve_app.gateway.runners.BEGIN_S", 0.3)
    slow = cold.gateway.backends[cold.model] = Slow()
    asked = {"requests": [{"messages": TURN}] * 20}
    await cold.http.post(f"{ACCOUNT}/run/{cold.model}?queueRequest=true", json=asked)
    batches, now = cold.gateway.state.batches, time.time

    async def claimed() -> Any:
        return await asyncio.to_thread(batches.claim, "another", now(), now() + 60.0, [cold.model], 9)

    async with asyncio.timeout(60):
        await slow.begun.wait()
    (claim,) = await until(claimed, bool)
    assert (claim.epoch, claim.done) == (2, 0)


async def test_openais_sdk_reads_what_was_not_run(endless):
    client = AsyncOpenAI(api_key=KEY, base_url="http://here/v1", **transport(endless))
    row = {"custom_id": "r", "method": "POST", "url": CHATS, "body": {"model": endless.model, "messages": TURN}}
    file = await client.files.create(file=("in.jsonl", orjson.dumps(row)), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
    if endless.how == "cancelled":
        await until(lambda: client.batches.retrieve(batch.id), lambda b: b.status == "in_progress")
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await until(lambda: client.batches.retrieve(batch.id), lambda b: b.status == endless.how)
    assert batch.cancelled_at or batch.expired_at
    assert (batch.request_counts.total, batch.request_counts.completed, batch.output_file_id) == (1, 0, None)
    (line,) = (await client.files.content(batch.error_file_id)).content.splitlines()
    assert orjson.loads(line)["error"]["code"] == f"batch_{endless.how}"


async def test_anthropics_sdk_reads_what_was_not_run(endless):
    client = AsyncAnthropic(api_key=KEY, base_url="http://here", **anthropic_transport(endless))
    params = {"model": endless.model, "max_tokens": 9, "messages": TURN}
    batch = await client.messages.batches.create(requests=[{"custom_id": "r", "params": params}])
    if endless.how == "cancelled":
        assert (await client.messages.batches.cancel(batch.id)).processing_status in ("canceling", "ended")
    batch = await until(lambda: client.messages.batches.retrieve(batch.id), lambda b: b.processing_status == "ended")
    assert batch.request_counts.canceled + batch.request_counts.expired == 1
    (found,) = [one async for one in await client.messages.batches.results(batch.id)]
    assert found.result.type == endless.how.replace("cancelled", "canceled")


@pytest.mark.parametrize("endless", ["cancelled"], indirect=True)
async def test_progress_is_told_as_it_goes_on(endless, monkeypatch):
    run, backend = f"{ACCOUNT}/run/{endless.model}", endless.gateway.backends[endless.model]
    made = await endless.http.post(run, params={"queueRequest": "true"}, json={"requests": [{"messages": TURN}] * 3})
    path = f"{ACCOUNT}/batches/{made.json()['result']['request_id']}"
    find, found = endless.gateway.batches.find, []

    async def seen(*which: Any) -> Any:
        found.append(await find(*which))
        return found[-1]

    monkeypatch.setattr(endless.gateway.batches, "find", seen)
    telling = asyncio.ensure_future(endless.http.get(f"{path}/events"))
    async with asyncio.timeout(60):
        await backend.begun.wait()
        while not found:
            await asyncio.sleep(0.01)
    await endless.http.post(f"{path}/cancel")
    *events, done = (await telling).text.strip().split("\n\n")
    told = [event.removeprefix("event: ").split("\ndata: ") for event in events]
    assert done == "data: [DONE]" and told[0][0] == "batch" and told[-1][0] == endless.how
    states = [orjson.loads(state) for _, state in told]
    assert states[0]["requests"]["waiting"] == 3 and states[-1]["requests"][endless.how] == 3
    assert len({state["status"] for state in states}) > 1
