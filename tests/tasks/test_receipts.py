"""What clients are told of the price is what the ledger says, in every dialect and however work ends."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import orjson
import pytest

from serve_app.api.errors import BooksClosed
from serve_app.api.types import ChoiceDone, GenerateRequest, TextDelta
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller, hash_key
from serve_app.state.spending.ledger import Entry
from tests.tasks.conftest import ACCOUNT, KEY, Served
from tests.tasks.test_backend import EchoBackend, frames
from tests.tasks.test_settle import BODIES, CHAT, EMBED, RERANK, encoded
from tests.waiting import until

SAID = {"role": "user", "content": "one two three"}
TEXT: dict[str, dict[str, Any]] = {
    f"{ACCOUNT}/run/{CHAT}": {"messages": [SAID]},
    "/v1/chat/completions": {"model": CHAT, "messages": [SAID], "stream_options": {"include_usage": True}},
    "/v1/completions": {"model": CHAT, "prompt": "one two three", "stream_options": {"include_usage": True}},
    "/v1/responses": {"model": CHAT, "input": "one two three"},
    "/v1/messages": {"model": CHAT, "messages": [SAID], "max_tokens": 9},
    "/api/chat": {"model": CHAT, "messages": [SAID]},
    "/api/generate": {"model": CHAT, "prompt": "one two three"},
}
# 2 uncached and one cached token in, three out: dollars 0.01, 0.001 and 0.02 per million; neurons 909, 91 and 1818.
NEURONS, MONEY = 2 * 909 + 91 + 3 * 1818, 20 + 1 + 60


def written(served: Served) -> list[Entry]:
    """All entries that have reached the journal."""
    segments = served.gateway.state.ledger._segments
    return [Entry.of(row.columns) for segment in segments for row in segment.waiting.values()]


def usage_in(body: Any) -> dict[str, Any]:
    """Wherever the dialect has it."""
    found = body.get("result", body.get("response", body)) if isinstance(body, dict) else {}
    found = found if isinstance(found, dict) else body
    return found.get("usage") or {}


async def quiet(served: Served) -> None:
    """Nothing reaches the store: it is the journal that is looked at."""
    state = served.gateway.state
    state._background.begin = lambda before=None: None


@pytest.mark.parametrize("path", TEXT)
@pytest.mark.parametrize("stream", [False, True])
async def test_text_in_every_dialect(serve, path, stream) -> None:
    async with serve(models=(CHAT,)) as served:
        await quiet(served)
        served.gateway.backends[CHAT] = EchoBackend()
        body = {key: value for key, value in TEXT[path].items() if stream or key != "stream_options"}
        answer = await served.http.post(path, json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        [entry] = written(served)
        if not stream:
            told = usage_in(answer.json())
        elif path.startswith("/api"):
            told = usage_in(orjson.loads(answer.text.splitlines()[-1]))
        else:
            told = [usage for frame in frames(answer.text) if "neurons" in (usage := usage_in(frame))][-1]
        assert (entry.neurons, entry.money, entry.currency) == (NEURONS, MONEY, "USD")
        assert told["neurons"] == NEURONS / 10**6
        assert told["cost"] == {"amount": "0.000000081", "currency": "USD"}
        assert entry.id == answer.headers["cf-ray"] and entry.key == hash_key(KEY)[:12]
        assert (entry.account, entry.model, entry.task, entry.status) == ("local", CHAT, "text-generation", "done")
        assert dict(entry.units) == {"input_tokens": 3, "cached_tokens": 1, "output_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{ACCOUNT}/run/{EMBED}", BODIES[EMBED]),
        (f"{ACCOUNT}/run/{RERANK}", BODIES[RERANK]),
        ("/v1/embeddings", {"model": EMBED, "input": "one"}),
        ("/v1/rerank", {"model": RERANK, "query": "one", "documents": ["two"]}),
        ("/v1/score", {"model": RERANK, "text_1": "one", "text_2": "two"}),
        ("/api/embed", {"model": EMBED, "input": "one"}),
        ("/api/embeddings", {"model": EMBED, "prompt": "one"}),
    ],
)
async def test_encoders_in_every_dialect(serve, path, body) -> None:
    async with serve(encoded, models=(EMBED, RERANK)) as served:
        await quiet(served)
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        [entry] = written(served)
        told = usage_in(answer.json())
        assert told["neurons"] == entry.neurons / 10**6 > 0 and entry.units["input_tokens"] > 0
        assert float(told["cost"]["amount"]) == entry.money / 10**9 > 0


async def test_several_prompts_are_several_entries(serve) -> None:
    async with serve(models=(CHAT,)) as served:
        await quiet(served)
        served.gateway.backends[CHAT] = EchoBackend()
        answer = await served.http.post("/v1/completions", json={"model": CHAT, "prompt": ["one", "one two three"]})
        made = {entry.id: entry for entry in written(served)}
        ray = answer.headers["cf-ray"]
        assert set(made) == {ray, f"{ray}.1"}
        assert answer.json()["usage"]["neurons"] * 10**6 == sum(entry.neurons for entry in made.values())


async def test_nobody_is_told_of_an_end_that_is_not_safe(serve) -> None:
    """While the journal is being written neither a whole answer nor a stream's last frames leave."""
    async with serve(models=(CHAT,)) as served:
        await quiet(served)
        served.gateway.backends[CHAT] = EchoBackend()
        ledger = served.gateway.state.ledger
        with ledger._lock:
            ask = {"model": CHAT, "prompt": "one two three"}
            whole = asyncio.ensure_future(served.http.post("/v1/completions", json=ask))
            [model] = served.gateway.models
            request = GenerateRequest(CHAT, None, "one two", True, SamplingParams(max_tokens=9), stream=True)
            events = await served.gateway.generate(model, request, Caller("local"))
            shown = [await anext(events) for _ in range(3)]
            assert [type(event) for event in shown] == [TextDelta, TextDelta, ChoiceDone]
            last = asyncio.ensure_future(anext(events))
            while ledger._thread is None or served.gateway.tally.requests[CHAT, "done"] < 2:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert not last.done() and not whole.done() and not written(served)
        usage = await last
        told = {usage.micro_neurons, round((await whole).json()["usage"]["neurons"] * 10**6)}
        assert told == {entry.neurons for entry in written(served)} and len(told) == 2
        await events.aclose()


async def test_a_stream_that_breaks_is_charged_for_what_was_sent(serve) -> None:
    async with serve(models=(CHAT,)) as served:
        await quiet(served)
        served.gateway.backends[CHAT] = EchoBackend()
        body = {"model": CHAT, "prompt": "one two break"}
        answer = await served.http.post("/v1/completions", json={**body, "stream": True})
        assert "error" in answer.text
        [entry] = written(served)
        assert entry.status == "failed" and entry.units["output_tokens"] == 2 and entry.units["input_tokens"] == 3
        # Of a whole answer that failed the client has seen nothing, as of one that was refused.
        assert (await served.http.post("/v1/completions", json=body)).status_code == 500
        assert (await served.http.post("/v1/completions", json={**body, "prompt": "busy"})).status_code == 429
        assert written(served) == [entry]


async def test_a_stream_whose_client_leaves_is_charged_for_what_it_took(serve) -> None:
    async with serve(models=(CHAT,)) as served:
        await quiet(served)
        served.gateway.backends[CHAT] = EchoBackend()
        [model] = served.gateway.models
        for stream in (True, False):
            request = GenerateRequest(CHAT, None, "one two three", True, SamplingParams(max_tokens=9), stream=stream)
            events = await served.gateway.generate(model, request, Caller("local"))
            assert [(await anext(events)).text for _ in range(2)] == ["one", " two"]
            await events.aclose()
        await until(lambda: written(served))
        [entry] = written(served)
        assert entry.status == "left" and entry.units["output_tokens"] == 2


async def test_with_a_full_disk_requests_are_refused_before_any_work(serve, monkeypatch) -> None:
    async with serve(encoded, models=(CHAT, EMBED)) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        ledger = served.gateway.state.ledger
        ask = {"model": CHAT, "prompt": "one two"}
        monkeypatch.setattr("serve_app.state.spending.ledger_writer.TRY_S", 0.01)

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as disk:
            disk.setattr("serve_app.state.journal.os.write", full)
            disk.setattr(ledger._store, "write", full)
            # The first ones find it out: nothing leaves that could not be written down.
            stream = await served.http.post("/v1/completions", json={**ask, "stream": True})
            assert "[DONE]" not in stream.text and "3040" in stream.text
            refused = await served.http.post("/v1/completions", json=ask)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["errors"][0]["code"] == 3040
            with pytest.raises(BooksClosed):
                ledger.check()
            embed = await served.http.post(f"{ACCOUNT}/run/{EMBED}", json=BODIES[EMBED])
            assert embed.status_code == 503 and served.endings == [("text-generation", "done")]
            health = (await served.http.get("/health")).json()
            assert health["store"]["ledger"] == "closed"
        await until(lambda: ledger.problem is None)
        assert (await served.http.post("/v1/completions", json=ask)).status_code == 200
        assert "ledger" not in (await served.http.get("/health")).json()["store"]
