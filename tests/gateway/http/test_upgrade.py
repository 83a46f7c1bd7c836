"""A state directory of the version before there were a ledger and limits: the next start upgrades it, and all works."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from alembic import command

from serve_app.state.callers.accounts import hash_key
from serve_app.state.migrations import HEAD
from serve_app.state.store import migrate
from serve_app.state.store.database import Database
from tests.gateway.http.test_accounts import CHAT, Served
from tests.state.gateways import until
from tests.tasks.test_backend import EchoBackend

BEFORE = "0003"
OLD, ADMIN, ENDED = "an old key of team-a, of this test", "an admin's key of team-a", "a key of team-a that has ended"
FIRST, SECOND = "resp_" + "a" * 32, "resp_" + "b" * 32
AGAIN = json.dumps({"model": CHAT, "input": "said before"}).encode()
SEEN = b'id: 1\ndata: {"response":"seen"}\n\nid: 2\ndata: [DONE]\n\n'


def rows(now: float) -> dict[str, list[dict[str, Any]]]:
    """Of every table that there was, as that version wrote them."""
    key = {"account": "team-a", "priority": "batch", "created": "2026-11-21T00:00:00+00:00", "member": ""}
    key |= {"scopes": "inference,read", "limits": "{}", "starts": None, "expires": None, "used": None, "enabled": True}
    turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    response = {"account": "team-a", "created": now, "size": 9, "turn": json.dumps(turn).encode()}
    bodies = {name: json.dumps({"id": name, "object": "response"}).encode() for name in (FIRST, SECOND)}
    printed = hashlib.sha256(b"\0".join([b"POST", b"/v1/responses", b"", AGAIN])).hexdigest()
    limits = json.dumps({"requests_per_minute": 60})
    stream = {"id": "stream1", "account": "team-a", "created": now, "keep_s": 60.0, "owner": "gone", "epoch": 1}
    stream |= {"status": "done", "seen": now, "frames": 2, "size": len(SEEN), "expires": now + 3600, "request": b""}
    return {
        "accounts": [{"name": "team-a", "weight": 2.5, "label": "Team A", "created": "2026-11-21", "limits": limits}],
        "members": [
            {"id": "m1", "account": "team-a", "email": "ann@example.com", "scopes": "read", "created": "2026-11-21"}
        ],
        "keys": [
            {**key, "hash": hash_key(OLD), "id": "old1", "name": "ci"},
            {**key, "hash": hash_key(ADMIN), "id": "old2", "name": "ops", "scopes": "inference,read,admin"},
            {**key, "hash": hash_key(ENDED), "id": "old3", "name": "was", "expires": now - 1},
        ],
        "audit": [
            {"id": "a1", "at": now, "account": "team-a", "actor": "ann", "via": "cli", "request": "",
             "action": "create", "kind": "key", "target": "old1", "changes": "{}"}
        ],
        "revisions": [{"name": "accounts", "revision": 7}],
        "rate_counts": [{"account": "team-a", "task": "text-generation", "minute": int(now // 60), "count": 10_000}],
        "responses": [
            {**response, "id": FIRST, "previous": None, "body": bodies[FIRST]},
            {**response, "id": SECOND, "previous": FIRST, "body": bodies[SECOND]},
        ],
        "traces": [{"account": "team-a", "id": "trace1", "ended": now, "body": b'{"id":"trace1"}'}],
        "streams": [stream],
        "stream_parts": [{"id": "stream1", "number": 1, "upto": 2, "frames": SEEN, "trail": b""}],
        "answers": [
            {"account": "team-a", "key": "again", "created": now, "print": printed, "owner": "gone", "size": 9,
             "answer": msgspec.msgpack.encode([b'{"id": "the answer that there was"}', "application/json", ""])}
        ],
    }  # fmt: skip


def make(home: Path, database: str | None) -> None:
    with closing(Database(home, database, lambda _: None)) as old, old.unprepared() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, BEFORE)
        tables = sa.MetaData()
        tables.reflect(connection)
        made = rows(time.time())
        assert set(tables.tables) - {"alembic_version", "stream_owners"} == set(made)
        for name, some in made.items():
            connection.execute(sa.insert(tables.tables[name]), some)


@pytest.fixture
async def upgraded(tmp_path: Path, database: str) -> Any:
    """A gateway on what such a state directory holds, SQLite's in its usual place."""
    url = None if database.startswith("sqlite") else database
    tmp_path.joinpath("api_key").write_text("kept as it is")
    make(tmp_path, url)
    served = Served(tmp_path, url)  # type: ignore[arg-type]
    await served.start()
    served.gateways[0].backends[CHAT] = EchoBackend()
    yield served
    await served.aclose()


async def test_what_was_there_is_there(upgraded, tmp_path):
    verify = "/client/v4/user/tokens/verify"
    for key, status in ((OLD, 200), (ADMIN, 200), (ENDED, 401)):
        assert (await upgraded.call("GET", verify, key)).status_code == status
    found = (await upgraded.call("GET", "/client/v4/accounts/team-a/tokens", ADMIN)).json()["result"]
    assert {(each["id"], each["name"], each["priority"]) for each in found} >= {("old1", "ci", "batch")}
    [member] = (await upgraded.call("GET", "/client/v4/accounts/team-a/members", ADMIN)).json()["result"]
    assert member["email"] == "ann@example.com"
    trail = (await upgraded.call("GET", "/client/v4/accounts/team-a/logs/audit", ADMIN)).json()["result"]
    assert [each["id"] for each in trail] == ["a1"]
    assert (await upgraded.call("GET", f"/v1/responses/{SECOND}", OLD)).json()["id"] == SECOND
    assert (await upgraded.call("GET", "/v1/requests/trace1", OLD)).json() == {"id": "trace1"}
    assert (await upgraded.call("GET", "/v1/requests/stream1/stream", OLD)).content == SEEN
    headers = {"Idempotency-Key": "again", "Authorization": f"Bearer {OLD}"}
    answer = await upgraded.clients[0].post("/v1/responses", content=AGAIN, headers=headers)
    assert answer.json() == {"id": "the answer that there was"} and answer.headers["Idempotent-Replayed"] == "true"
    assert tmp_path.joinpath("api_key").read_text() == "kept as it is"
    database = upgraded.gateways[0].state._store.database
    assert migrate.version(database) == HEAD
    with database.unprepared(write=False) as connection:
        assert not sa.inspect(connection).has_table("rate_counts")


async def test_usage_begins_at_zero_and_limits_hold(upgraded):
    gateway, usage = upgraded.gateways[0], "/client/v4/accounts/team-a/ai/usage"
    assert (await upgraded.call("GET", usage, OLD)).json()["result"] == []
    # A conversation goes on, and is charged; what was counted of this minute before counts no more.
    body = {"model": CHAT, "input": "one two three", "previous_response_id": SECOND}
    answer = await upgraded.call("POST", "/v1/responses", OLD, json=body)
    assert answer.status_code == 200, answer.text
    assert "q=60" in answer.headers["Ratelimit-Policy"]
    said = await gateway.state.responses.conversation("team-a", answer.json()["id"])
    assert [each["content"] for each in said][:4] == ["one", "two", "one", "two"] and len(said) == 6
    await until(lambda: gateway.state.ledger.waiting == 0)
    [row] = (await upgraded.call("GET", usage, OLD)).json()["result"]
    assert row["requests"] == 1 and row["neurons"] == answer.json()["usage"]["neurons"] > 0
