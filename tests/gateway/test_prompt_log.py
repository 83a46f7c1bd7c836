"""Prompts and answers: nothing of them is anywhere unless an operator has said so, and then nothing that is a key."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app import logs
from serve_app.gateway.http.request_id import ids_at_hand
from serve_app.gateway.prompt_log import Prompts
from serve_app.state.callers.book import AccountBook
from serve_app.state.kept.prompt_log import KIND
from serve_app.state.protocols import Row
from serve_app.state.store.sql import SqlStore
from tests.gateway.http.test_accounts import Served
from tests.tasks.conftest import ACCOUNT, KEY, serve  # noqa: F401
from tests.tasks.test_backend import EchoBackend
from tests.tasks.test_settle import CHAT, EMBED, RERANK, encoded
from tests.waiting import until

MARKER = "xylophone7391"
ANSWER = "mirrored5520"
LOG = f"{ACCOUNT}/prompt-log"
SAID = [{"role": "user", "content": f"{MARKER} says {ANSWER}"}]
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": CHAT, "messages": SAID}),
    ("/v1/chat/completions", {"model": CHAT, "messages": SAID, "stream": True}),
    ("/v1/completions", {"model": CHAT, "prompt": f"{MARKER} {ANSWER}"}),
    ("/v1/responses", {"model": CHAT, "input": f"{MARKER} {ANSWER}", "store": False}),
    ("/v1/messages", {"model": CHAT, "messages": SAID, "max_tokens": 9}),
    (f"{ACCOUNT}/run/{CHAT}", {"prompt": f"{MARKER} {ANSWER}"}),
    (f"{ACCOUNT}/run/{EMBED}", {"text": [MARKER]}),
    (f"{ACCOUNT}/run/{RERANK}", {"query": MARKER, "contexts": [{"text": ANSWER}]}),
    ("/api/generate", {"model": CHAT, "prompt": f"{MARKER} {ANSWER}"}),
]
# What fails, and how: a worker that breaks, one that is full, and a body that is refused.
FAILS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": CHAT, "messages": [{"role": "user", "content": f"{MARKER} break"}]}),
    ("/v1/chat/completions", {"model": CHAT, "messages": [{"role": "user", "content": f"{MARKER} busy"}]}),
    ("/v1/chat/completions", {"model": CHAT, "messages": [{"role": MARKER, "content": MARKER}]}),
    ("/v1/chat/completions", {"model": CHAT, "messages": SAID, "lora": MARKER}),
]


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Everything that is logged by whatever logger, as the setting has it."""
    monkeypatch.setenv("SERVE_APP_LOG", request.param)
    found = io.StringIO()
    handler = logging.StreamHandler(found)
    if request.param == "json":
        handler.setFormatter(logs.JsonLines("gateway", ids_at_hand))
    loggers = [logging.getLogger(name) for name in ("", "ray", "ray.serve")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield found
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def all_bytes(home: Path) -> bytes:
    """Of every file of the state directory but weights, whose folder is shared."""
    files = [path for path in home.rglob("*") if path.is_file() and "weights" not in path.relative_to(home).parts]
    assert any(path.name.startswith("state") for path in files), files
    return b"\n".join(path.read_bytes() for path in files)


async def test_nothing_of_a_prompt_is_anywhere_unless_it_is_switched_on(serve, written, tmp_path):  # noqa: F811
    async with serve(encoded) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        await served.gateway.state.start()
        ids = []
        for url, body in (*ASKS, *FAILS):
            answer = await served.http.post(url, json=body)
            ids.append(answer.headers["cf-ray"])
            assert (answer.status_code == 200) == ((url, body) in ASKS), (url, answer.text)
        await served.http.post("/dashboard/session", json={"key": KEY})
        await served.http.post("/dashboard/session", json={"key": f"{MARKER} is no key"})
        traces = await served.http.get("/v1/requests?limit=1000")
        for own_id in ids:
            assert (await served.http.get(f"{LOG}/{own_id}")).status_code == 404
        one = await served.http.get(f"/v1/requests/{ids[0]}")
        assert one.status_code == 200
        told = [traces.text, one.text, (await served.http.get("/v1/metrics/now")).text]
    # Closed: everything that waited is written.
    everything = [written.getvalue(), *told]
    state = all_bytes(tmp_path)
    assert ids[0].encode() in state
    for secret in (MARKER, ANSWER, KEY):
        assert secret.encode() not in state, secret
        assert not any(secret in text for text in everything), secret
    # The loggers have been heard.
    assert ids[-1] in written.getvalue()


async def test_what_is_kept_once_it_is_switched_on(serve, written, tmp_path):  # noqa: F811
    async with serve(encoded) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        await served.gateway.state.start()
        rule = await served.http.put(LOG, json={"days": 2})
        assert rule.json()["result"] | {"most_bytes": 0} == {"enabled": True, "days": 2, "all": False, "most_bytes": 0}
        found = []
        for url, body in (*ASKS, *FAILS[:2]):
            answer = await served.http.post(url, json=body)
            kept = await served.http.get(f"{LOG}/{answer.headers['cf-ray']}")
            assert kept.status_code == 200, (url, kept.text)
            found.append(kept.json()["result"])
        assert all(MARKER in json.dumps(one["prompt"]) for one in found)
        for one, (url, _) in zip(found, ASKS, strict=False):
            encodes = EMBED in url or RERANK in url
            assert encodes == (one["answer"] is None), url
            if not encodes:
                assert ANSWER in one["answer"][0]["text"], url
            assert one["until"] - one["time"] == pytest.approx(2 * 86_400)
        # What had been written before it broke.
        assert found[len(ASKS)]["answer"] == [{"text": MARKER}]
        await asyncio.to_thread(served.gateway.state._writer.flush)
        again = await served.http.get(f"{LOG}/{found[0]['id']}")
        assert again.json()["result"] == found[0]
    assert MARKER not in written.getvalue() and ANSWER not in written.getvalue()
    assert KEY.encode() not in all_bytes(tmp_path)


async def test_keys_are_hidden_and_what_is_long_is_cut(serve, tmp_path):  # noqa: F811
    others = (
        "sk-proj-abcdefghijklmnop1234",
        "hf_abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnop1234",
        "AKIAABCDEFGHIJKLMNOP",
    )
    async with serve(encoded) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        gateway = served.gateway
        await gateway.state.start()
        made = await served.http.post("/client/v4/accounts/local/tokens", json={"name": "x", "scopes": ["read"]})
        own = made.json()["result"]["value"]
        await served.http.put(LOG, json={"days": 2})
        said = f"my keys: {own} and {' '.join(others)} and password=hunter2hunter2 Bearer abcdefghijk. Hello"
        body = {"model": CHAT, "messages": [{"role": "user", "content": said}]}
        answer = await served.http.post("/v1/chat/completions", json=body)
        kept = (await served.http.get(f"{LOG}/{answer.headers['cf-ray']}")).json()["result"]
        for secret in (own, *others, "hunter2", "abcdefghijk"):
            assert secret not in json.dumps(kept)
        assert kept["prompt"]["messages"][0]["content"].endswith("Hello") and "[key]" in kept["answer"][0]["text"]
        long = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={"prompt": "word " * 100_000})
        kept = await served.http.get(f"{LOG}/{long.headers['cf-ray']}")
        assert "characters left out" in kept.text and len(kept.content) < 200_000
        many = await served.http.post(f"{ACCOUNT}/run/{EMBED}", json={"text": ["t" * 90] * 90})
        assert (await served.http.get(f"{LOG}/{many.headers['cf-ray']}")).status_code == 200


@pytest.mark.parametrize(
    "secret", ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_-9", "jwt-eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0."]
)
def test_tokens_are_hidden_and_their_first_letters_alone_take_no_time(secret):
    prompts = Prompts(None, AccountBook("local", ()))  # type: ignore[arg-type]
    assert prompts.hidden(f"it is {secret}, or so") == "it is [key], or so"
    before = time.thread_time()
    assert len(prompts.hidden("eyJ-" * 16_000)) == 64_000
    # Some milliseconds; with every "eyJ" a beginning, many seconds.
    assert time.thread_time() - before < 1


def test_with_an_account_goes_what_was_kept_of_it(tmp_path):
    now = time.time()
    kept = {"account": "theirs", "id": "abc", "at": now, "until": now + 60.0, "body": b"{}"}
    with SqlStore(tmp_path) as store:
        store.accounts.create("theirs")
        store.prompts.keep("theirs", 1.0)
        store.write([Row(KIND, ("theirs", "abc"), kept, 2)])
        assert store.prompts.find("theirs", "abc", now) is not None
        store.accounts.remove("theirs")
        store.accounts.create("theirs")
        assert store.prompts.find("theirs", "abc", now) is None and store.prompts.rules() == {}


async def test_who_may_switch_see_and_delete(served: Served) -> None:
    """And that all gateways go by it; for the store of each kind."""
    at = await served.start()
    first, second = served.gateways[0], served.gateways[at]
    path = "/client/v4/accounts/team/ai/prompt-log"
    await served.call("POST", "/client/v4/accounts", json={"name": "team"})
    keys = {}
    for scopes in (["admin"], ["read"]):
        made = await served.call("POST", "/client/v4/accounts/team/tokens", json={"name": "x", "scopes": scopes})
        keys[scopes[0]] = made.json()["result"]["value"]
    # An account sees whether it is on, and cannot switch it.
    assert (await served.call("GET", path, keys["read"])).json()["result"]["enabled"] is False
    for method in ("PUT", "DELETE"):
        assert (await served.call(method, path, keys["admin"], json={"days": 1})).status_code == 403
    for days in (0, -1, 1e9, "x", True, None):
        assert (await served.call("PUT", path, json={"days": days})).status_code == 400
    assert (await served.call("PUT", path, json={"days": 1})).status_code == 200
    await until(lambda: second.state.prompts.days("team") == 1)
    assert second.state.prompts.days("local") is None

    one = {"id": "r1", "model": CHAT, "prompt": {}, "answer": None}
    first.state.prompts.add("team", "r1", 1e9, json.dumps(one).encode())
    first.state.prompts.add("local", "r1", 1e9, json.dumps(one).encode())  # of which nothing is kept
    for name in ("r2", "r3"):
        first.state.prompts.add("team", name, 4e9, json.dumps(one | {"id": name}).encode())
    await asyncio.to_thread(first.state._writer.flush)
    assert (await served.call("GET", f"{path}/r2", keys["read"])).status_code == 403
    assert (await served.call("GET", f"{path}/r2", keys["admin"], at=at)).json()["result"]["id"] == "r2"
    assert (await served.call("GET", f"{path}/r2")).status_code == 200  # the operator
    other = "/client/v4/accounts/local/ai/prompt-log/r2"
    assert (await served.call("GET", other)).status_code == 404
    assert (await served.call("GET", other, keys["admin"])).status_code == 403
    # Kept for a day since 2001.
    assert (await served.call("GET", f"{path}/r1")).status_code == 404
    assert (await served.call("DELETE", f"{path}/r2", keys["admin"])).status_code == 200
    assert (await served.call("GET", f"{path}/r2")).status_code == 404
    told = (await served.call("DELETE", path)).json()["result"]
    # The one whose time is over may have gone by itself.
    assert told["deleted"] in (1, 2) and told["enabled"] is False
    assert (await served.call("GET", f"{path}/r3")).status_code == 404
    # What was still under way when it ended is not written.
    first.state.prompts._rules = {"team": 1.0}
    first.state.prompts.add("team", "r4", 4e9, b"{}")
    await asyncio.to_thread(first.state._writer.flush)
    assert (await served.call("GET", f"{path}/r4")).status_code == 404

    # Of all accounts, with one's own rule before it.
    assert (await served.call("PUT", path, json={"days": 3})).status_code == 200
    own = "/client/v4/accounts/local/ai/prompt-log"
    assert (await served.call("PUT", own, json={"days": 9, "all": True})).json()["result"]["all"] is True
    assert [first.state.prompts.days(name) for name in ("team", "local", "x")] == [3, 9, 9]
    assert (await served.call("DELETE", own + "?all=true")).status_code == 200
    assert first.state.prompts.days("team") is None
    trail = (await served.call("GET", "/client/v4/user/audit_logs")).json()["result"]
    assert sum(one["resource"]["type"] == "prompts" for one in trail) == 6


def test_the_oldest_go_where_there_is_too_much(database, tmp_path):
    from serve_app.state.protocols import Row
    from serve_app.state.store.kept.prompt_log import PromptTable
    from serve_app.state.store.sql import SqlStore

    with SqlStore(tmp_path, database) as store:
        store.open()
        store.prompts = store._rooms["prompt"] = PromptTable(store.database, most_bytes=2000)
        store.prompts.keep("a", 1e6)
        store.prompts.keep("b", 1e6)
        body = bytes(range(256))  # which cannot be compressed
        for number in range(20):
            for account in ("a", "b")[: 1 if number > 3 else 2]:
                columns = {"account": account, "id": f"r{number:02}", "at": float(number), "until": 9e9, "body": body}
                store.write([Row("prompt", (account, f"r{number}"), columns, 256)])
        store.prompts.trim(0.0)
        kept = [number for number in range(20) if store.prompts.find("a", f"r{number:02}", 0.0)]
        assert kept == list(range(20 - len(kept), 20)) and 5 <= len(kept) <= 8
        assert all(store.prompts.find("b", f"r{number:02}", 0.0) for number in range(4))
