"""Conversations that clients name: owners, order, pages, bounds, several gateways, and a store that comes and goes."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.errors import InvalidInput, NotFound, StoreAway
from serve_app.state.kept import conversations as rooms
from serve_app.state.store.kept.bounds import Keep
from serve_app.state.store.kept.conversations import ConversationTable
from tests.state.gateways import Gateways


def item(name: str) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "user", "content": [{"type": "input_text", "text": name}]}


def items(*names: str) -> list[dict[str, Any]]:
    return [item(name) for name in names]


@pytest.fixture
def gateways(database, tmp_path):
    with Gateways(database, tmp_path) as made:
        yield made


async def names(store: Any, account: str, conversation_id: str) -> list[str]:
    return [found["id"] for found in (await store.load(account, conversation_id))[0]]


async def test_what_one_gateway_adds_another_finds(gateways):
    one, two = gateways.make("one").conversations, gateways.make("two").conversations
    made = await one.create("a", {"k": "v"}, items("1", "2"))
    assert made.metadata == b'{"k":"v"}' and await two.get("a", made.id) == made
    await two.add("a", made.id, items("3"))
    await one.append("a", made.id, "resp", items("4", "5"))
    assert await names(two, "a", made.id) == ["1", "2", "3", "4", "5"]
    assert await two.item("a", made.id, "3") == item("3")
    page, more = await two.items("a", made.id, after="4", limit=2, descending=True)
    assert ([found["id"] for found in page], more) == (["3", "2"], True)
    page, more = await two.items("a", made.id, after="4", limit=2, descending=False)
    assert ([found["id"] for found in page], more) == (["5"], False)
    before = await two.get("a", made.id)
    assert (await one.remove("a", made.id, "2")).size < before.size
    assert await names(two, "a", made.id) == ["1", "3", "4", "5"]
    # As far as it went when something was asked of it.
    assert [found["id"] for found in (await two.load("a", made.id, before=3))[0]] == ["1", "3"]
    assert (await two.update("a", made.id, {})).metadata == b"{}"
    await two.delete("a", made.id)
    for asked in (one.get("a", made.id), one.load("a", made.id), one.add("a", made.id, items("x"))):
        with pytest.raises(NotFound):
            await asked


async def test_an_account_sees_its_own_only(gateways):
    store = gateways.make("one").conversations
    mine = await store.create("a", {}, items("secret"))
    for asked in (
        store.get("b", mine.id),
        store.update("b", mine.id, {"x": "y"}),
        store.delete("b", mine.id),
        store.add("b", mine.id, items("x")),
        store.items("b", mine.id, after=None, limit=9, descending=True),
        store.item("b", mine.id, "secret"),
        store.remove("b", mine.id, "secret"),
        store.load("b", mine.id),
    ):
        with pytest.raises(NotFound):
            await asked
    # An answer to a request that could not be is added to nothing.
    await store.append("b", mine.id, "resp", items("x"))
    assert await names(store, "a", mine.id) == ["secret"]


@pytest.mark.parametrize("name", ["", "\0", "x\0y", "é", "x" * 5000, "\ud800", "' OR 1=1 --"])
async def test_ids_that_cannot_be_are_like_those_that_never_were(gateways, name):
    store = gateways.make("one").conversations
    made = await store.create("a", {}, [])
    asked = (store.get("a", name), store.delete("a", name), store.update("a", name, {}), store.item("a", made.id, name))
    for one in asked:
        with pytest.raises(NotFound):
            await one


async def test_answers_given_while_the_store_is_away_are_there_when_it_is_back_once_and_in_order(gateways):
    state, other = gateways.make("one"), gateways.make("two")
    await state.start()
    await other.start()
    made = await state.conversations.create("a", {}, items("1"))
    gateways.lose()
    await state.conversations.append("a", made.id, "resp_1", items("2"))
    await state.conversations.append("a", made.id, "resp_2", items("3"))
    for asked in (state.conversations.load("a", made.id), other.conversations.get("a", made.id)):
        with pytest.raises(StoreAway):
            await asked
    gateways.find()
    await gateways.settled()
    for store in (state.conversations, other.conversations):
        assert await names(store, "a", made.id) == ["1", "2", "3"]
    assert state.conversations._waiting == {}
    row = {"account": "a", "conversation": made.id, "items": [["3", b"{}"]]}
    with state._store.database.writing() as connection:
        state._store.conversations.write(connection, [row, {**row, "conversation": "conv_gone"}])
    assert await names(other.conversations, "a", made.id) == ["1", "2", "3"]


async def test_a_conversation_has_bounds(gateways, monkeypatch):
    store = gateways.make("one").conversations
    made = await store.create("a", {}, items("1", "2", "3"))
    monkeypatch.setattr(rooms, "MAX_ITEMS", 2)
    with pytest.raises(InvalidInput, match="more than 2 items"):
        await store.load("a", made.id)
    monkeypatch.setattr(rooms, "MAX_BYTES", 20)
    with pytest.raises(InvalidInput, match="at most 20 bytes"):
        await store.add("a", made.id, items("4"))
    with pytest.raises(InvalidInput, match="more than 20 bytes"):
        await store.load("a", made.id)


@pytest.mark.parametrize("bounds", [{"max_count": 10}, {"max_bytes": 1000}])
def test_the_longest_unused_go_first(store, bounds):
    table = ConversationTable(store.database, Keep(**bounds))
    table.create("b", "other", b"{}")
    table.create("a", "used", b"{}")
    for n in range(65):
        table.create("a", f"{n}", b"{" + b" " * 100 + b"}")
        assert table.add("a", "used", [(f"i{n}", b"{}")])
    alive = [table.find("a", f"{n}") is not None for n in range(65)]
    assert alive == sorted(alive) and alive[-1] and not alive[0] and sum(alive) <= 10 + 32
    assert table.find("a", "used") is not None and table.find("b", "other") is not None


def test_an_old_conversation_is_gone(store):
    table = ConversationTable(store.database, Keep(max_age_s=0.0))
    table.create("a", "x", b"{}")
    assert table.find("a", "x") is None and not table.add("a", "x", [("1", b"{}")])
