"""Stored responses: chains, owners, bounds, several gateways, and a store that comes and goes."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from serve_app.api.errors import InvalidInput, NotFound, StoreAway
from serve_app.state.kept import responses
from serve_app.state.store.kept.bounds import Keep
from serve_app.state.store.kept.responses import ResponseTable
from tests.state.gateways import Gateways


def response(previous: str | None = None) -> dict[str, Any]:
    return {"id": f"resp_{uuid.uuid4().hex}", "previous_response_id": previous, "output": []}


def turn(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": f"re {text}"}]


@pytest.fixture
def gateways(database, tmp_path):
    with Gateways(database, tmp_path) as made:
        yield made


@pytest.fixture
def patient(monkeypatch):
    """An answer waits for the store however long that takes here."""
    monkeypatch.setattr(responses, "PATIENCE_S", 60.0)


async def test_a_conversation_is_the_chain_of_its_turns(gateways, patient):
    store, other = gateways.make("one").responses, gateways.make("two").responses
    first = response()
    second, branch = response(first["id"]), response(first["id"])
    await store.put("a", first, turn("one"))
    await other.put("a", second, turn("two"))
    await store.put("a", branch, turn("else"))
    assert await store.conversation("a", None) == []
    # What one gateway stored, another finds at once.
    assert await other.conversation("a", first["id"]) == turn("one")
    assert await store.conversation("a", second["id"]) == turn("one") + turn("two")
    assert await other.conversation("a", branch["id"]) == turn("one") + turn("else")
    assert await gateways.make("three").responses.get("a", second["id"]) == second
    await other.delete("a", first["id"])
    with pytest.raises(NotFound):
        await store.get("a", first["id"])
    with pytest.raises(NotFound):
        await store.delete("a", first["id"])
    with pytest.raises(InvalidInput, match=first["id"]):
        await store.conversation("a", second["id"])


async def test_an_account_sees_its_own_only(gateways, patient):
    store = gateways.make("one").responses
    mine = response()
    await store.put("a", mine, turn("secret"))
    with pytest.raises(NotFound):
        await store.get("b", mine["id"])
    with pytest.raises(NotFound):
        await store.delete("b", mine["id"])
    with pytest.raises(InvalidInput):
        await store.conversation("b", mine["id"])
    # Nor through a response of one's own that names another's.
    await store.put("b", theirs := response(mine["id"]), turn("x"))
    with pytest.raises(InvalidInput, match=mine["id"]):
        await store.conversation("b", theirs["id"])
    assert await store.get("a", mine["id"]) == mine


@pytest.mark.parametrize("name", ["\0", "x\0y", "é", "x" * 5000, "\ud800", "' OR 1=1 --"])
async def test_ids_that_cannot_be_are_like_those_that_never_were(gateways, name):
    store = gateways.make("one").responses
    with pytest.raises(NotFound):
        await store.get("a", name)
    with pytest.raises(NotFound):
        await store.delete("a", name)
    with pytest.raises(InvalidInput):
        await store.conversation("a", name)


async def test_a_long_chain_ends(gateways, monkeypatch, patient):
    monkeypatch.setattr("serve_app.state.kept.responses.MAX_TURNS", 3)
    store = gateways.make("one").responses
    previous = None
    for n in range(6):
        one = response(previous)
        await store.put("a", one, turn("x"))
        previous = one["id"]
        if n < 3:
            assert len(await store.conversation("a", previous)) == 2 * (n + 1)
    with pytest.raises(InvalidInput, match="turns back"):
        await store.conversation("a", previous)


async def test_while_the_store_is_away_a_gateway_knows_its_own(gateways, monkeypatch, patient):
    state, other = gateways.make("one"), gateways.make("two")
    await state.start()
    await other.start()
    store = state.responses
    first = response()
    await store.put("a", first, turn("one"))
    gateways.lose()
    monkeypatch.setattr(responses, "PATIENCE_S", 0.1)
    second = response(first["id"])
    third = response(second["id"])
    fresh = response()
    for kept in (second, third, fresh):
        await store.put("a", kept, turn(kept["id"]))
    assert await store.get("a", third["id"]) == third
    assert await store.conversation("a", fresh["id"]) == turn(fresh["id"])
    # What lies in the store alone is neither there nor gone.
    for asked in (store.get("a", first["id"]), store.conversation("a", third["id"]), store.delete("a", third["id"])):
        with pytest.raises(StoreAway):
            await asked
    with pytest.raises(StoreAway):
        await other.responses.get("a", third["id"])
    gateways.find()
    await gateways.settled()
    whole = turn("one") + turn(second["id"]) + turn(third["id"])
    assert await other.responses.conversation("a", third["id"]) == whole == await store.conversation("a", third["id"])


def row(account: str, n: int, size: int = 100) -> dict[str, Any]:
    key = f"{account}-{n:03}"
    sizes = {"size": size, "turn": b"[]", "body": b"{}"}
    return {"id": key, "account": account, "created": 2e9 + n, "previous": None, **sizes}


@pytest.mark.parametrize("bounds", [{"max_count": 10}, {"max_bytes": 1000}])
def test_the_oldest_go_first(store, bounds):
    table = ResponseTable(store.database, Keep(**bounds))
    with store.database.writing() as connection:
        table.write(connection, [row("b", 0)])
    for n in range(65):
        with store.database.writing() as connection:
            table.write(connection, [row("a", n)])
    alive = [table.body("a", f"a-{n:03}") is not None for n in range(65)]
    assert alive == sorted(alive) and alive[-1] and not alive[0]
    # Bounds are looked at every 32nd time.
    assert sum(alive) <= 10 + 32
    assert table.body("b", "b-000") is not None


def test_age(store):
    table = ResponseTable(store.database, Keep(max_age_s=60))
    with store.database.writing() as connection:
        table.write(connection, [{**row("a", 0), "created": 1.0}, row("a", 1)])
    assert table.body("a", "a-000") is None and table.chain("a", "a-000", 9) == []
    assert table.body("a", "a-001") is not None
