"""Each piece of work is settled exactly once, with its usage, however it ends: per task and ending."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import GenerateRequest
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.work import WorkerGone
from serve_app.wire.encode import EncodeCall, Encoded
from serve_app.wire.methods import Method
from tests.media.files import sound
from tests.tasks.conftest import ACCOUNT
from tests.tasks.test_backend import EchoBackend
from tests.waiting import until

CHAT = "@cf/pico/pico-instruct"
EMBED = "@cf/sentence-transformers/all-minilm-l6-v2"
RERANK = "@cf/pico/pico-reranker"
BODIES: dict[str, dict[str, Any]] = {
    EMBED: {"text": ["one", "two words"]},
    RERANK: {"query": "one", "contexts": [{"text": "two"}, {"text": "three"}]},
}
TASKS = {EMBED: "text-embeddings", RERANK: "reranking"}
OPERATOR = Caller("local")


async def full(*_: Any) -> Any:
    raise OutOfCapacity


async def lost(*_: Any) -> Any:
    raise WorkerGone("a worker of this model was lost")


async def broken(*_: Any) -> Any:
    raise RuntimeError("nobody foresaw this")


async def encoded(model: Any, method: Method, call: EncodeCall) -> Encoded:
    """A worker that gives each sequence a vector, or each pair a score."""
    count = len(np.frombuffer(call.lengths, np.int32))
    shape = (count, 4) if call.types is None else (count,)
    return Encoded(shape, np.full(shape, 0.5, np.float32).tobytes())


@pytest.mark.parametrize("model", BODIES)
@pytest.mark.parametrize(
    ("worker", "settings", "status", "code"),
    [
        (encoded, {}, "done", 200),
        (encoded, {"max_inflight": 1}, "refused", 429),
        (lost, {}, "failed", 429),
        (broken, {}, "failed", 500),
    ],
)
async def test_encoders(serve, model, worker, settings, status, code) -> None:
    async with serve(worker, models=(model,), **settings) as served:
        [started] = served.gateway.models
        if status == "refused":
            started.places.take("local", 1.0, 1, 1)
        answer = await served.http.post(f"{ACCOUNT}/run/{model}", json=BODIES[model])
        assert answer.status_code == code
        assert served.endings == [(TASKS[model], status)]
        [settled] = served.settled
        assert settled.caller.account == "local" and settled.request_id == answer.headers["cf-ray"]
        counted = answer.json()["result"]["usage"]["prompt_tokens"] if code == 200 else 0
        assert settled.usage.prompt_tokens == counted and (counted > 0) == (code == 200)
        assert served.gateway.tally.requests == {(model, status): 1}
        # Whoever sent it can see what became of it.
        trace = (await served.http.get(f"/v1/requests/{answer.headers['cf-ray']}")).json()
        assert trace["status"] == status and trace["events"][0]["event"] == "received"


@pytest.mark.parametrize("model", BODIES)
async def test_encoders_whose_client_leaves(serve, model) -> None:
    async def slow(*_: Any) -> Any:
        await asyncio.sleep(60)

    async with serve(slow, models=(model,)) as served:
        asking = asyncio.ensure_future(served.http.post(f"{ACCOUNT}/run/{model}", json=BODIES[model]))
        [started] = served.gateway.models
        while not started.inflight:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert served.endings == [(TASKS[model], "left")] and started.inflight == 0


@pytest.mark.parametrize("path", ["native", "openai"])
async def test_who_leaves_during_a_transcription_pays_nothing_and_ends_it(serve, record, path) -> None:
    """It is a whole answer, of which nothing has been seen."""
    hears, ended = record("automatic-speech-recognition", "predictor"), asyncio.Event()

    async def hearing(*_: Any) -> Any:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async with serve(hearing, models=(hears,)) as served:
        http, data = served.http, sound(0.2)
        if path == "native":
            sent = http.post(f"{ACCOUNT}/run/{hears}", content=data)
        else:
            form = {"files": {"file": ("a.wav", data)}, "data": {"model": hears}}
            sent = http.post("/v1/audio/transcriptions", **form)
        asking = asyncio.ensure_future(sent)
        [started] = served.gateway.models
        await until(lambda: started.inflight or asking.done())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert served.endings == [("automatic-speech-recognition", "left")] and ended.is_set()
        [settled] = served.settled
        assert settled.entry is None and started.inflight == 0
        trace = (await http.get(f"/v1/requests/{settled.request_id}")).json()
        assert trace["status"] == "left"


async def test_embeddings_in_openai_words(serve) -> None:
    async with serve(encoded, models=(EMBED,)) as served:
        answer = await served.http.post("/v1/embeddings", json={"model": EMBED, "input": "one"})
        assert answer.status_code == 200
        assert [s.usage.prompt_tokens for s in served.settled] == [answer.json()["usage"]["prompt_tokens"]]


DIALECTS: dict[str, dict[str, Any]] = {
    f"{ACCOUNT}/run/{CHAT}": {},
    "/v1/chat/completions": {"model": CHAT},
    "/v1/messages": {"model": CHAT, "max_tokens": 9},
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "status", "prompt", "completion"),
    [("one two", "done", 2, 2), ("busy", "refused", 1, 0), ("one break", "failed", 2, 1)],
)
async def test_text(serve, path, stream, said, status, prompt, completion) -> None:
    async with serve(models=(CHAT,)) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        body = {**DIALECTS[path], "messages": [{"role": "user", "content": said}], "stream": stream}
        answer = await served.http.post(path, json=body)
        assert served.endings == [("text-generation", status)]
        usage = served.settled[0].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, completion)
        trace = (await served.http.get(f"/v1/requests/{answer.headers['cf-ray']}")).json()
        assert trace["status"] == status


async def test_text_whose_client_leaves(serve) -> None:
    async with serve(models=(CHAT,)) as served:
        backend = served.gateway.backends[CHAT] = EchoBackend()
        [model] = served.gateway.models
        request = GenerateRequest(CHAT, None, "one two three", True, SamplingParams(max_tokens=9), n=5)
        events = await served.gateway.generate(model, request, OPERATOR)
        assert served.endings == [] and model.inflight == 0  # nothing has begun
        await anext(events)
        assert model.inflight == 5
        await events.aclose()
        assert served.endings == [("text-generation", "left")] and backend.closed == 1 and model.inflight == 0
        assert served.settled[0].usage.completion_tokens == 1


@pytest.mark.parametrize(("worker", "status"), [(lost, "failed"), (full, "failed"), (broken, "failed")])
async def test_text_of_engine_workers(serve, worker, status) -> None:
    async with serve(worker, models=(CHAT,)) as served:
        answer = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={"prompt": "Hello"})
        assert answer.status_code == (500 if worker is broken else 429)
        assert served.endings == [("text-generation", status)]
        assert served.settled[0].usage.total_tokens == 0


async def test_every_choice_takes_a_place(serve) -> None:
    """``n`` answers are n streams to the engine, and count as such in this gateway."""
    async with serve(lost, models=(CHAT,), max_inflight=8) as served:
        [model] = served.gateway.models
        served.gateway.backends[CHAT] = EchoBackend()
        ask = {"prompt": "one", "n": 4}
        with model.place(OPERATOR, 8, streams=5):
            refused = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json=ask)
            assert refused.status_code == 429 and refused.json()["errors"][0]["code"] == 3040
        with model.place(OPERATOR, 8, streams=4):
            assert (await served.http.post(f"{ACCOUNT}/run/{CHAT}", json=ask)).status_code == 200
        # Alone, a request may have more answers than there are places.
        assert (await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={**ask, "n": 16})).status_code == 200
        assert served.endings == [("text-generation", status) for status in ("refused", "done", "done")]


async def test_a_subscriber_that_fails_is_not_the_clients_affair(serve) -> None:
    def fails(settled: Any) -> None:
        raise RuntimeError("the books are closed")

    async with serve(encoded, models=(EMBED,)) as served:
        served.gateway.settlement.subscribers.insert(0, fails)
        answer = await served.http.post(f"{ACCOUNT}/run/{EMBED}", json=BODIES[EMBED])
        assert answer.status_code == 200 and served.endings == [("text-embeddings", "done")]
