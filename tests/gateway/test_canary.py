"""Canaries: which version answers which requests, what names it, and what an operator may say of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from serve_app.batch.check import Checker
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import BUILT_IN, load_catalog
from serve_app.catalog.operated import NO_CANARY, Operated, Share
from serve_app.gateway import canary
from serve_app.state.callers.accounts import Caller
from serve_app.state.check import read_operated
from serve_app.state.store.sql import SqlStore
from tests.gateway.http.test_batched import job, perform
from tests.gateway.resume.conftest import TEXT, Worker, start
from tests.gateway.resume.test_resume import NATIVE, TURN
from tests.tasks.conftest import ACCOUNT, serve
from tests.tasks.test_backend import EchoBackend

__all__ = ["serve", "start"]
CHAT, NEXT = "@cf/pico/pico-instruct", "@cf/pico/pico-next"
ACTIONS = f"{ACCOUNT}/models/actions"
SAID = [{"role": "user", "content": "one two three"}]


def write_next(home: Path, model: str = NEXT, more: str = "", of: str = "pico-instruct") -> None:
    """A record like the chat model's, under another id."""
    text = (BUILT_IN / f"{of}.yaml").read_text()
    old = text.split("\n", 1)[0]
    folder = home / "models"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{model.rsplit('/', 1)[-1]}.yaml").write_text(text.replace(old, f'id: "{model}"', 1) + more)


@pytest.fixture
def two(serve, tmp_path):
    """A gateway with two versions of a model, both of which say what they hear."""
    write_next(tmp_path)

    async def ask(served: Any, session: str = "", **more: Any) -> dict[str, Any]:
        headers = {"x-session-affinity": session} if session else {}
        body = {"model": CHAT, "messages": SAID, **more}
        answer = await served.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def opened(**settings: Any) -> Any:
        return serve(**settings)

    return opened, ask


async def say(served: Any, share: dict[str, Any] | None, model: str = CHAT) -> Any:
    served.gateway.backends |= {CHAT: EchoBackend(), NEXT: EchoBackend()}
    return await served.http.post(ACTIONS, json={"model": model, "action": "canary", "canary": share})


async def test_a_share_of_sessions_goes_to_the_new_version_and_stays_there(two):
    opened, ask = two
    async with opened() as served:
        assert (await say(served, {"model": NEXT, "percent": 30})).status_code == 200
        first = {f"s{i}": (await ask(served, f"s{i}"))["model"] for i in range(100)}
        assert set(first.values()) == {CHAT, NEXT} and 10 < list(first.values()).count(NEXT) < 55
        assert all([(await ask(served, s))["model"] == model for s, model in list(first.items())[:10]])
        # The body's name for a session is one as well, and another account's of that name is another session.
        assert (await ask(served, prompt_cache_key="s1"))["model"] == first["s1"]
        # What was used is counted and charged as the version that answered.
        assert {settled.model for settled in served.settled} == {CHAT, NEXT}
        assert all(settled.entry.model == settled.model for settled in served.settled)
        # Raised without a restart: who was there stays, others follow; and all come back at the end.
        await say(served, {"model": NEXT, "percent": 80})
        then = {s: (await ask(served, s))["model"] for s in first}
        assert all(then[s] == NEXT for s, model in first.items() if model == NEXT)
        assert list(then.values()).count(NEXT) > list(first.values()).count(NEXT)
        shown = (await say(served, None)).json()["result"]
        assert shown["canary"] is None
        assert {(await ask(served, s))["model"] for s in list(first)[:20]} == {CHAT}


async def test_without_a_session_each_request_is_a_draw_of_its_own(two):
    opened, ask = two
    async with opened() as served:
        await say(served, {"model": NEXT, "percent": 50})
        assert {(await ask(served))["model"] for _ in range(40)} == {CHAT, NEXT}
        await say(served, {"model": NEXT, "percent": 0})
        assert {(await ask(served))["model"] for _ in range(10)} == {CHAT}


ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": CHAT, "messages": SAID}),
    ("/v1/chat/completions", {"model": "pico/pico-instruct", "messages": SAID, "stream": True}),
    ("/v1/completions", {"model": CHAT, "prompt": "one two"}),
    ("/v1/responses", {"model": CHAT, "input": "one two"}),
    ("/v1/messages", {"model": CHAT, "messages": SAID, "max_tokens": 9}),
    ("/api/chat", {"model": CHAT, "messages": SAID, "stream": False}),
]


async def test_every_dialect_names_who_answered(two):
    opened, _ = two
    async with opened() as served:
        await say(served, {"model": NEXT, "percent": 100})
        for url, body in ASKS:
            answer = await served.http.post(url, json=body)
            assert answer.status_code == 200 and NEXT in answer.text and CHAT not in answer.text, (url, answer.text)
        native = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={"prompt": "one two"})
        assert native.json()["result"]["response"] == "one two"
        from_handle = await served.gateway.run_handle(CHAT, {"prompt": "one two"})
        assert from_handle["result"]["response"] == "one two"
        assert {settled.model for settled in served.settled} == {NEXT}


async def test_what_is_not_up_gets_nothing_and_an_adapter_stays_with_its_weights(two):
    opened, ask = two
    async with opened() as served:
        await say(served, {"model": NEXT, "percent": 100})
        models = served.gateway.models
        model, other = models.started[CHAT], models.started[NEXT]
        assert canary.drawn(models, model, 99.9, adapter=False) is other
        assert canary.drawn(models, model, 0.0, adapter=True) is model
        other.ready = False
        assert (await ask(served, "s"))["model"] == CHAT
        listed = (await served.http.get(f"{ACCOUNT}/models/records")).json()["result"]
        [shown] = [one["canary"] for one in listed if one["model"] == CHAT]
        assert shown == {"model": NEXT, "percent": 100.0, "ready": False}
        other.ready, model.ready = True, False
        assert (await ask(served, "s"))["model"] == NEXT


async def test_a_batch_runs_on_one_version_whatever_is_said_meanwhile(two):
    opened, _ = two
    async with opened() as served:
        await say(served, {"model": NEXT, "percent": 50})
        known, found = served.gateway.known, set()
        body = orjson.dumps({"model": CHAT, "messages": SAID})
        for _ in range(30):
            checker = Checker(known, Caller("local"))
            checked = [checker.check("/v1/chat/completions", body) for _ in range(5)]
            [model] = {one.model.id for one in checked}
            kept = {} if model == CHAT else {f"canary {CHAT}": NEXT}
            assert all(one.kept == kept for one in checked)
            found.add(model)
        assert found == {CHAT, NEXT}
        await say(served, {"model": NEXT, "percent": 100})
        begun = job("/v1/chat/completions", {"model": CHAT, "messages": SAID})
        [before] = await perform(served, begun)
        assert orjson.loads(before.body)["model"] == CHAT
        begun.request.kept[f"canary {CHAT}"] = NEXT
        await say(served, None)
        [after] = await perform(served, begun)
        assert orjson.loads(after.body)["model"] == NEXT


@pytest.mark.parametrize("percent", [0, 100])
async def test_a_resumed_stream_goes_on_with_its_version(start, tmp_path, percent):
    write_next(tmp_path)
    worker = Worker(let=8)
    first, second = await start(worker), await start(worker)
    for gateway in (first, second):
        gateway.models.catalog.canaries[CHAT] = Share(NEXT, percent=percent)
    body = {"messages": TURN, "stream": True, "seed": 0, "options": {"resumable": 60}}

    reading = asyncio.ensure_future(first.http.post(NATIVE, json=body))
    await worker.holds(1, first)
    [stream_id] = first.streams._running
    # Said otherwise before it goes on elsewhere.
    second.models.catalog.canaries[CHAT] = Share(NEXT, percent=100 - percent)
    await first.kill()
    reading.cancel()
    worker.on.set()
    whole = await second.http.get(f"/v1/requests/{stream_id}/stream")
    assert whole.status_code == 200, whole.text
    said = [orjson.loads(line[6:]) for line in whole.text.splitlines() if line.startswith("data: {")]
    assert "".join(one.get("response") or "" for one in said) == TEXT
    assert {settled.model for settled in second.settled} == {NEXT if percent else CHAT}


REFUSED: list[tuple[dict[str, Any] | None, str]] = [
    ({"model": NEXT, "percent": 101}, "percent: 101 is out of range. Use a value at most 100"),
    ({"model": NEXT, "percent": -1}, "percent: -1 is out of range"),
    ({"model": NEXT, "percent": "5"}, "percent: '5' does not fit"),
    ({"model": NEXT}, "percent: this key is required"),
    ({"model": NEXT, "percent": 5, "why": 1}, "why: unknown key"),
    ({"model": "@cf/no/such", "percent": 5}, "there is no model @cf/no/such"),
    ({"model": CHAT, "percent": 5}, "no canary of itself"),
    ({"model": "@cf/pico/pico-reranker", "percent": 5}, "does reranking and"),
    ({"model": "@cf/pico/small", "percent": 5}, "has context_window 16"),
]


async def test_what_cannot_be_followed_is_refused(two, tmp_path):
    opened, _ = two
    write_next(tmp_path, "@cf/pico/third")
    write_next(tmp_path, "@cf/pico/small")
    path = tmp_path / "models" / "small.yaml"
    lines = [("  context_window: 16" if "context_window" in line else line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    async with opened() as served:
        for share, says in REFUSED:
            answer = await say(served, share)
            assert answer.status_code == 400 and says in answer.json()["errors"][0]["message"], answer.text
        wrong = {"model": CHAT, "action": "canary", "canary": 5}
        assert (await served.http.post(ACTIONS, json=wrong)).status_code == 400
        assert (await say(served, {"model": CHAT, "percent": 1}, "@cf/no/such")).status_code == 404
        # Neither a circle nor a chain, from either end.
        assert (await say(served, {"model": NEXT, "percent": 5})).status_code == 200
        circle = await say(served, {"model": CHAT, "percent": 5}, NEXT)
        assert "has a canary itself" in circle.json()["errors"][0]["message"]
        chain = await say(served, {"model": "@cf/pico/third", "percent": 5}, NEXT)
        assert "is itself a canary of @cf/pico/pico-instruct" in chain.json()["errors"][0]["message"]


def test_a_record_may_say_it_and_a_wrong_one_is_refused_with_its_file(tmp_path):
    write_next(tmp_path)
    write_next(tmp_path, CHAT, f'\ncanary: {{model: "{NEXT}", percent: 2.5}}\n')
    catalog = load_catalog(tmp_path)
    assert catalog.canaries == {CHAT: Share(NEXT, percent=2.5)}
    # By hand it is ended, or another share; and a restart finds that.
    for said, holds in ((NO_CANARY, {}), (Share(NEXT, percent=50), {CHAT: Share(NEXT, percent=50)})):
        with SqlStore(tmp_path) as store:
            store.open()
            store.operated.put("local", Operated(CHAT, canary=said))
            assert store.operated.all() == read_operated(tmp_path, None) == {CHAT: Operated(CHAT, canary=said)}
        assert load_catalog(tmp_path, operated=read_operated(tmp_path, None)).canaries == holds
    write_next(tmp_path, NEXT, f'\ncanary: {{model: "{CHAT}", percent: 1}}\n')
    with pytest.raises(CatalogError, match="canary: @cf/pico/pico-.* has a canary itself"):
        load_catalog(tmp_path)
    write_next(tmp_path, NEXT, '\ncanary: {model: "@cf/no/such", percent: 1}\n')
    write_next(tmp_path, CHAT)
    with pytest.raises(CatalogError, match=r"pico-next.yaml: canary: there is no model @cf/no/such"):
        load_catalog(tmp_path)


def test_a_draw_is_even_and_the_same_for_the_same():
    draws = [canary.draw(CHAT, f"s{i}") for i in range(4000)]
    assert draws == [canary.draw(CHAT, f"s{i}") for i in range(4000)]
    assert all(0 <= draw < 100 for draw in draws)
    for low in range(0, 100, 10):
        assert 300 < sum(low <= draw < low + 10 for draw in draws) < 500
