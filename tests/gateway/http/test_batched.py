"""Requests of batches through the handlers of their routes, and a whole batch through a runner over a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from serve_app.api.errors import OutOfCapacity
from serve_app.batch.job import Done, Job
from serve_app.gateway.batches import Works
from serve_app.gateway.http.app import endpoints
from serve_app.gateway.http.batched import performer
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch, Counts, Request
from serve_app.tasks.work import WorkerGone
from tests.batch.running import ended, running
from tests.tasks.conftest import ACCOUNT, serve
from tests.tasks.test_backend import EchoBackend
from tests.tasks.test_settle import BODIES, CHAT, EMBED, RERANK, encoded

__all__ = ["serve"]
OWN = Caller("local", key="k")
SAID = [{"role": "user", "content": "one two three"}]
ASKS: list[tuple[str, dict[str, Any], Callable[[Any], Any]]] = [
    ("/v1/chat/completions", {"model": CHAT, "messages": SAID}, lambda a: a["choices"][0]["message"]["content"]),
    ("/v1/completions", {"model": CHAT, "prompt": "one two"}, lambda a: a["choices"][0]["text"]),
    ("/v1/responses", {"model": CHAT, "input": "one two"}, lambda a: a["output"][0]["content"][0]["text"]),
    ("/v1/messages", {"model": CHAT, "messages": SAID, "max_tokens": 9}, lambda a: a["content"][0]["text"]),
    (f"{ACCOUNT}/run/{CHAT}", {"prompt": "one two"}, lambda a: a["result"]["response"]),
    (f"{ACCOUNT}/run/{RERANK}", BODIES[RERANK], lambda a: a["result"]["response"]),
    ("/v1/embeddings", {"model": EMBED, "input": ["one"]}, lambda a: a["data"][0]["embedding"]),
]


def job(url: str, body: Any, number: int = 0) -> Job:
    return Job("b" * 32, Request(number, "x", url, orjson.dumps(body)), OWN, time.time())


async def perform(served: Any, *jobs: Job) -> list[Done]:
    run = performer(endpoints(served.gateway), served.gateway.state.accounts.today)
    return [await asyncio.create_task(run(one)) for one in jobs]


@pytest.mark.parametrize(("url", "body", "said"), ASKS, ids=[ask[0] for ask in ASKS])
async def test_every_dialect_answers_as_over_http(serve, url, body, said):
    async with serve(encoded) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        alone = await served.http.post(url, json=body)
        streams = {"stream": True, "stream_options": {"include_usage": True}} if "embeddings" not in url else {}
        [plain, streamed] = await perform(served, job(url, body), job(url, {**body, **streams}, 1))
        assert said(alone.json()) == said(orjson.loads(plain.body)) == said(orjson.loads(streamed.body))
        for done, number in ((plain, 0), (streamed, 1)):
            assert done.status == 200 and done.retry_after is None
            [entry] = done.entries
            assert (entry.id, entry.batch, entry.account) == (job(url, body, number).request_id, "b" * 32, "local")
        assert [settled.caller.priority for settled in served.settled] == ["realtime", "batch", "batch"]
        # Its entries wait for being written with its result.
        assert served.gateway.state.ledger.written == 1


async def test_errors_are_in_the_words_of_the_dialect_and_say_whether_to_try_again(serve):
    calls: list[Exception] = [WorkerGone("gone")] * 3 + [OutOfCapacity(retry_after=7.0), RuntimeError("nobody foresaw")]

    async def worker(*_: Any) -> Any:
        raise calls.pop(0)

    embed = job(f"{ACCOUNT}/run/{EMBED}", BODIES[EMBED])
    async with serve(worker) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        wrong = job("/v1/chat/completions", {"model": CHAT, "messages": 7})
        missing = job("/v1/messages", {"model": "@cf/no/such", "messages": SAID, "max_tokens": 9})
        nowhere = job("/v1/nothing", {})
        found = await perform(served, wrong, missing, nowhere, embed, embed, embed)
        assert [done.status for done in found] == [400, 404, 404, 429, 429, 500]
        assert [done.retry_after for done in found] == [None, None, None, 5.0, 7.0, 1.0]
        assert [done.at_fault for done in found] == [False, False, False, True, False, True]
        first, second, *_, last = [orjson.loads(done.body) for done in found]
        assert first["error"]["type"] == "invalid_request_error" and first["error"]["param"] == "messages"
        assert second["type"] == "error" and last["errors"][0]["code"] == 8005
        assert not any(done.entries for done in found)


async def test_a_batch_runs_over_a_gateway_from_its_file_to_its_files(serve):
    urls = "/v1/chat/completions"
    bodies = [{"model": CHAT, "messages": [{"role": "user", "content": f"word {n}"}]} for n in range(5)]
    bodies[3]["max_tokens"] = -1
    asked = [
        orjson.dumps({"custom_id": f"c{n}", "method": "POST", "url": urls, "body": b}) for n, b in enumerate(bodies)
    ]
    async with serve(encoded) as served:
        gateway = served.gateway
        gateway.backends[CHAT] = EchoBackend()
        state, now = gateway.state, time.time()
        state.files.put("files/one", b"\n".join(asked))
        about = orjson.dumps({"endpoint": urls, "id": "batch_1"})
        batch = Batch("b" * 32, "openai", OWN, now, now + 600, 60.0, about=about, input="files/one")
        state.batches.create(batch)
        async with running(Works(gateway)):
            found = await ended(state.batches, batch)
        assert found.status == "completed" and found.counts == Counts(5, 4, 1)
        lines = [orjson.loads(line) for line in state.files.get(found.output).splitlines()]
        assert [line["custom_id"] for line in lines] == ["c0", "c1", "c2", "c4"]
        assert all(line["response"]["status_code"] == 200 for line in lines)
        [error] = [orjson.loads(line) for line in state.files.get(found.errors).splitlines()]
        assert error["custom_id"] == "c3"
        # The receipt of the batch is the ledger's.
        entries = [entry for line in lines for entry in receipt(state, line["response"]["request_id"])]
        assert sum(entry.neurons for entry in entries) == found.used.neurons > 0
        assert {entry.batch for entry in entries} == {"b" * 32}
        assert not state.batches.busy()


def receipt(state: Any, request_id: str) -> list[Any]:
    return state._store.usage.receipt("local", request_id)
