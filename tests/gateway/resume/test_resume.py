"""Streams that go on without their client and without their gateway, in every dialect."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import orjson
import pytest

from serve_app.gateway.http.resumable import _Kept
from serve_app.gateway.resume import streams
from serve_app.state.callers.accounts import ALL_SCOPES, USUAL_SCOPES, hash_key
from serve_app.state.store.sql import SqlStore
from tests.gateway.resume.conftest import CHAT, KEY, TEXT, Lost, Worker, looks
from tests.variants import some
from tests.waiting import until

NATIVE = f"/client/v4/accounts/local/ai/run/{CHAT}"
TURN = [{"role": "user", "content": "hi"}]
CALL = """Let me see what the weather is like there.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>"""
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
# By name: path, body, and what the choices say.
Cases = dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]
DIALECTS: Cases = {
    "native": (NATIVE, {"messages": TURN}, (TEXT,)),
    "native tools": (NATIVE, {"messages": TURN, "tools": TOOLS}, (CALL,)),
    "chat": ("/v1/chat/completions", {"messages": TURN, "stream_options": {"include_usage": True}}, (TEXT,)),
    "chat of two": ("/v1/chat/completions", {"messages": TURN, "n": 2}, (TEXT, TEXT[9:])),
    "chat tools": ("/v1/chat/completions", {"messages": TURN, "tools": TOOLS}, (CALL,)),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, (TEXT, TEXT[9:])),
    "messages": ("/v1/messages", {"messages": TURN, "max_tokens": 100}, (TEXT,)),
    "responses": ("/v1/responses", {"input": "hi"}, (TEXT,)),
    "responses tools": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **WEATHER}]}, (CALL,)),
}

# Of a model that reasons, and under grammars; each choice has drafts of its own.
JSON = '{"city": "Paris", "sights": ["tower", "river"], "people": 2102650}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "people": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
THOUGHT = "<think>\nThey want to know of a city. Paris, then, with all of its people.\n</think>\n\n"
USED = {"stream_options": {"include_usage": True}}
GUIDED: Cases = {
    "native": (NATIVE, {"messages": TURN, "response_format": FORMAT}, (JSON,)),
    "native reasoning": (NATIVE, {"messages": TURN}, (THOUGHT + TEXT,)),
    "chat": ("/v1/chat/completions", {"messages": TURN, "response_format": FORMAT, **USED}, (THOUGHT + JSON,)),
    "chat of two": (
        "/v1/chat/completions",
        {"messages": TURN, "response_format": FORMAT, "n": 2, "logprobs": True},
        (JSON, THOUGHT + JSON),
    ),
    "chat tools": (
        "/v1/chat/completions",
        {"messages": TURN, "tools": TOOLS, "tool_choice": "required", **USED},
        (THOUGHT + CALL.partition("\n")[2],),
    ),
    "chat choice": ("/v1/chat/completions", {"messages": TURN, "guided_choice": [TEXT, JSON]}, (TEXT,)),
    "messages": (
        "/v1/messages",
        {"messages": TURN, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        (THOUGHT + TEXT,),
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}},
        (THOUGHT + JSON,),
    ),
    "responses tools": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **WEATHER}]},
        (THOUGHT + CALL,),
    ),
}


TEXTS = [texts for _, _, texts in DIALECTS.values()]


def asked(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": CHAT, "stream": True, "seed": 1000 * number, "options": {"resumable": 60}, **body}


async def post_all(gateway: Lost, cases: Cases = DIALECTS) -> list[asyncio.Task[httpx.Response]]:
    """Every case's request, in their order."""
    bodies = enumerate(cases.values())
    return [asyncio.ensure_future(gateway.http.post(path, json=asked(n, body))) for n, (path, body, _) in bodies]


def numbers(body: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"^id: (\d+)$", body, re.M)]


def said(body: bytes) -> str:
    """Text and calls of all choices, one choice after the other."""
    found: dict[int, list[str]] = {}

    def look(value: Any, index: int) -> None:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if name in ("content", "text", "response", "delta", "arguments", "partial_json") and isinstance(inner, str):
                found.setdefault(index, []).append(inner)
            elif isinstance(inner, dict | list):
                choice = isinstance(inner, dict) and "finish_reason" in inner
                look(inner, inner["index"] if choice else index)

    for line in body.splitlines():
        if line.startswith(b"data: {"):
            look(orjson.loads(line[6:]), 0)
    return "|".join("".join(found[index]) for index in sorted(found))


def outline(body: bytes) -> tuple[str, list[int], bytes]:
    """A stream without its ids: what it says, in how many frames, and how it ends."""
    return said(body), numbers(body), body[-14:]


def beyond(body: bytes, after: int) -> bytes:
    """The frames behind the first ``after``."""
    return b"".join(frame + b"\n\n" for frame in body.split(b"\n\n")[after:-1])


async def test_another_gateway_goes_on_frame_by_frame_in_every_dialect(start):
    calm = await start(Worker(TEXTS))
    alone = [(await task).content for task in await post_all(calm)]
    undisturbed = sorted(str(settled.usage) for settled in calm.settled)
    calm.settled.clear()
    worker = Worker(TEXTS, let=9)
    one, other = await start(worker), await start(worker)
    reading = await post_all(one)
    await worker.holds(13, one)
    # In the order in which they were sent, as their requests' seeds are.
    ids = {stream.id: stream.frames[:] for stream in one.streams._running.values()}
    await one.kill()
    for task in reading:
        task.cancel()
    worker.on.set()
    answers = [await other.http.get(f"/v1/requests/{stream_id}/stream") for stream_id in ids]
    for answer, shown in zip(answers, ids.values(), strict=True):
        # What was shown stands, and what follows is what would have followed.
        assert answer.content.startswith(b"".join(shown)) and numbers(answer.content)[-1] > len(shown)
    assert sorted(map(outline, alone)) == sorted(outline(answer.content) for answer in answers)
    # Tokens that were had were not made again, and each piece of work was settled once.
    assert all(call.resumed for call in worker.calls[13:])
    # Whichever of the others went on.
    assert not one.settled and sorted(str(s.usage) for s in other.settled + calm.settled) == undisturbed
    assert {s.status for s in other.settled + calm.settled} == {"done"}
    # Whoever goes on with it does so for the key that asked.
    assert {(s.caller.key, s.caller.scopes) for s in other.settled} <= {(hash_key(KEY)[:12], ALL_SCOPES)}
    # Whoever has lost the connection reads on where that was, at any gateway.
    whole, stream_id = answers[0].content, next(iter(ids))
    for after in (0, 4, len(numbers(whole))):
        for gateway in (other, calm):
            found = await gateway.http.get(f"/v1/requests/{stream_id}/stream", headers={"Last-Event-ID": str(after)})
            assert found.content == beyond(whole, after)
            assert (await gateway.http.get(f"/v1/requests/{stream_id}/stream?after={after}")).content == found.content


@pytest.mark.parametrize("let", some([11, 17], 17))
async def test_another_gateway_goes_on_with_grammars_reasoning_and_drafts(start, let):
    """Steps are of other lengths there, as other drafts stand."""
    texts, record = [texts for _, _, texts in GUIDED.values()], {"reasoning_parser": "qwen3"}
    calm_worker = Worker(texts, step=1)
    calm = await start(calm_worker, record=record)
    alone = [(await task).content for task in await post_all(calm, GUIDED)]
    assert not [body for body in alone if not body.endswith((b"[DONE]\n\n", b'"message_stop"}\n\n'))]
    undisturbed = sorted(str(settled.usage) for settled in calm.settled)
    assert sum(s.usage.reasoning_tokens > 0 for s in calm.settled) == 7
    calm.settled.clear()
    # The calm one has no part in it.
    await calm.silence()
    worker = Worker(texts, let=let, step=4)
    one = await start(worker, record=record)
    reading = await post_all(one, GUIDED)
    await worker.holds(10, one)
    ids = {stream.id: stream.frames[:] for stream in one.streams._running.values()}
    assert len(ids) == len(GUIDED)
    worker.step = 3
    other = await start(worker, record=record)
    await one.kill()
    for task in reading:
        task.cancel()
    worker.on.set()
    answers = [(await other.http.get(f"/v1/requests/{stream_id}/stream")).content for stream_id in ids]
    for answer, shown in zip(answers, ids.values(), strict=True):
        assert answer.startswith(b"".join(shown)) and numbers(answer) == list(range(1, len(numbers(answer)) + 1))
    assert sorted((parts(body), body[-14:]) for body in alone) == sorted((parts(body), body[-14:]) for body in answers)
    assert sorted(str(settled.usage) for settled in other.settled) == undisturbed and not one.settled
    # What is asked of the next worker is what was asked of the lost one, behind the tokens that there are.
    before, after = (
        {(c.sampling.seed, c.sampling.grammar) for c in calls} for calls in (calm_worker.calls, worker.calls)
    )
    assert before == after and sum(grammar is not None for _, grammar in before) == 7
    assert all(call.resumed == let for call in worker.calls[10:]) and len(worker.calls) == 20


def parts(body: bytes) -> list[tuple[str, str]]:
    """What was said under each name, so that reasoning, text and calls are told apart."""
    found: dict[str, str] = {}

    def look(value: Any, name: str, kind: str, index: int) -> None:
        if isinstance(value, dict):
            index = value["index"] if isinstance(value.get("index"), int) else index
            for key, inner in value.items():
                look(inner, key, kind, index)
        elif isinstance(value, list):
            for inner in value:
                look(inner, name, kind, index)
        elif isinstance(value, str) and name in SAID:
            found[f"{kind} {index} {name}"] = found.get(f"{kind} {index} {name}", "") + value

    for line in body.splitlines():
        if line.startswith(b"data: {"):
            event = orjson.loads(line[6:])
            look(event, "", event.get("type", ""), 0)
    return sorted(found.items())


SAID = ("content", "text", "response", "delta", "arguments", "partial_json", "thinking", "reasoning_content", "token")


async def test_a_gateway_that_was_thought_dead_adds_nothing(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    reading = asyncio.ensure_future(one.http.post("/v1/chat/completions", json=asked(0, {"messages": TURN})))
    await worker.holds(1, one)
    (stream,) = one.streams._running.values()
    # It says nothing for too long, and does not know.
    one.streams._loops[1].cancel()
    one.streams._release()
    whole = asyncio.ensure_future(other.http.get(f"/v1/requests/{stream.id}/stream"))
    await until(lambda: stream.id in other.streams._running)
    worker.on.set()
    assert (await whole).content == (await reading).content
    assert stream.lost and said((await reading).content) == TEXT
    assert len(one.settled) + len(other.settled) == 1


async def test_a_request_nobody_waits_for_ends_after_its_time_and_is_kept_for_as_long(start, monkeypatch):
    worker = Worker(let=9)
    gateway = await start(worker)
    reading = asyncio.ensure_future(
        gateway.http.post("/v1/messages", json=asked(0, {"messages": TURN, "max_tokens": 99}))
    )
    await worker.holds(1, gateway)
    (stream,) = gateway.streams._running.values()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await looks(gateway, 3, monkeypatch)
    late = SimpleNamespace(time=lambda: time.time() + 61, monotonic=lambda: time.monotonic() + 61)
    monkeypatch.setattr(streams, "time", late)
    await until(lambda: stream.complete)
    frames = (await gateway.http.get(f"/v1/requests/{stream.id}/stream")).content
    assert b"No client was there for 60 seconds" in frames and b"event: error" in frames
    assert [s.status for s in gateway.settled] == ["left"] and gateway.settled[0].usage.completion_tokens == 9
    found = await gateway.http.get(f"/v1/requests/{stream.id}/stream")
    assert found.content == frames
    gateway.streams._store.trim(time.time() + 122)
    gone = await gateway.http.get(f"/v1/requests/{stream.id}/stream")
    assert gone.status_code == 410 and "expired" in gone.json()["errors"][0]["message"]
    gateway.streams._store.trim(time.time() + 122 + 86_400)
    assert (await gateway.http.get(f"/v1/requests/{stream.id}/stream")).status_code == 404


async def test_a_request_is_cancelled_through_any_gateway_by_its_account_alone(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    reading = asyncio.ensure_future(one.http.post(NATIVE, json=asked(0, {"messages": TURN})))
    await worker.holds(1, one)
    (stream,) = one.streams._running.values()
    with SqlStore(Path(one.settings.home)) as store:
        stranger = {"Authorization": f"Bearer {store.accounts.add('stranger')}"}
    one.state._revisions = other.state._revisions = None
    await asyncio.gather(*(asyncio.to_thread(gateway.state._look) for gateway in (one, other)))
    for method, path in (("GET", "/stream"), ("POST", "/cancel"), ("DELETE", "")):
        refused = await other.http.request(method, f"/v1/requests/{stream.id}{path}", headers=stranger)
        unknown = await other.http.request(method, f"/v1/requests/{'0' * 32}{path}")
        assert refused.status_code == unknown.status_code == 404 and refused.json() == unknown.json()
    ended = await other.http.delete(f"/client/v4/accounts/local/ai/requests/{stream.id}")
    assert ended.json() == {"id": stream.id, "status": "cancelled"}
    assert b"was cancelled" in (await reading).content and worker.calls[0].id not in one.inbox._streams
    assert [s.status for s in one.settled] == ["left"]
    # Once more changes nothing.
    assert (await one.http.post(f"/v1/requests/{stream.id}/cancel")).json()["status"] == "cancelled"


async def test_what_goes_wrong_before_the_first_token_is_still_a_status(start):
    worker = Worker([(TEXT,), ("",)], let=9)
    gateway = await start(worker, max_inflight=1)
    first = asyncio.ensure_future(gateway.http.post(NATIVE, json=asked(0, {"messages": TURN})))
    await worker.holds(1, gateway)
    refused = await gateway.http.post("/v1/chat/completions", json=asked(0, {"messages": TURN}))
    assert refused.status_code == 429 and len(gateway.streams._running) == 1
    assert [settled.status for settled in gateway.settled] == ["refused"]
    worker.on.set()
    assert said((await first).content) == TEXT
    bad = {"messages": TURN, "options": {"resumable": 0}}
    assert (await gateway.http.post("/v1/chat/completions", json=asked(0, bad))).status_code == 400


async def test_streams_that_are_not_to_be_resumed_are_as_they_were(start):
    gateway = await start(Worker())
    body = {"model": CHAT, "stream": True, "messages": TURN, "seed": 0}
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    assert said(answer.content) == TEXT and not numbers(answer.content)
    assert (await gateway.http.get(f"/v1/requests/{answer.headers['cf-ray']}/stream")).status_code == 404
    by_header = await gateway.http.post("/v1/chat/completions", json=body, headers={"x-resumable": "5"})
    assert numbers(by_header.content)


async def test_responses_in_the_background(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    body = {"model": CHAT, "input": "hi", "seed": 0, "background": True}
    queued = (await one.http.post("/v1/responses", json=body)).json()
    assert queued["status"] == "queued" and queued["background"] is True and queued["output"] == []
    await worker.holds(1, one)
    path = f"/v1/responses/{queued['id']}"
    running = (await other.http.get(path)).json()
    assert running == {**queued, "status": "in_progress"}
    # Nobody reads it, and its gateway dies.
    await one.kill()
    worker.on.set()
    events = (await other.http.get(path, params={"stream": "true"})).content
    done = (await other.http.get(path)).json()
    assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == TEXT == said_by(events)
    shown = [orjson.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
    assert [event["sequence_number"] for event in shown] == list(range(len(shown))) and shown[-1]["response"] == done
    later = (await other.http.get(path, params={"stream": "true", "starting_after": 7})).content
    assert orjson.loads(later.splitlines()[2][6:])["sequence_number"] == 8 and events.endswith(later)
    refused = await other.http.post("/v1/responses", json={**body, "store": False})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "background"


async def test_responses_in_the_background_are_cancelled(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    body = {"model": CHAT, "input": "hi", "seed": 0, "background": True, "stream": True}
    reading = asyncio.ensure_future(one.http.post("/v1/responses", json=body))
    await worker.holds(1, one)
    (stream,) = one.streams._running.values()
    cancelled = (await other.http.post(f"/v1/responses/resp_{stream.id}/cancel")).json()
    assert cancelled["status"] == "cancelled" and TEXT.startswith(cancelled["output"][0]["content"][0]["text"])
    assert (await reading).content.endswith(b"data: [DONE]\n\n")
    assert (await one.http.get(f"/v1/responses/resp_{stream.id}")).json() == cancelled
    unknown = await other.http.post(f"/v1/responses/resp_{'0' * 32}/cancel")
    assert unknown.status_code == 404


def said_by(events: bytes) -> str:
    shown = [orjson.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
    return "".join(event["delta"] for event in shown if event["type"] == "response.output_text.delta")


def test_a_request_that_a_version_without_scopes_kept_is_run_again():
    old = msgspec.msgpack.encode(["/below", "/v1/completions", b"", [], b"{}", 2.0, "batch"])
    kept = msgspec.msgpack.decode(old, type=_Kept)
    assert (kept.path, kept.weight, kept.key, frozenset(kept.scopes)) == ("/v1/completions", 2.0, "", USUAL_SCOPES)
