"""Adapters in the store, on both databases."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.state.blobs.adapter_book import AdapterBook
from serve_app.state.blobs.adapters import (
    CONFIG,
    KEPT_S,
    WEIGHTS,
    Adapter,
    AdapterError,
    AdapterTaken,
    blob,
    content_digest,
)
from serve_app.state.reader import ReadPool
from serve_app.state.state import State
from serve_app.state.store.sql import SqlStore
from tests.waiting import until

MODEL = "@cf/pico/pico-instruct"
A, B = "a" * 64, "b" * 64


def made(account: str = "acct", name: str = "mine", at: float = 100.0, **fields: object) -> Adapter:
    return Adapter(str(uuid.uuid4()), account, MODEL, name, at, at, **fields)  # type: ignore[arg-type]


def served(store: SqlStore, adapter: Adapter, digest: str, at: float = 100.0) -> Adapter:
    """With a checked version more."""
    now = replace(adapter, version=adapter.version + 1, digest=digest, rank=8, size=10, opened=False, modified=at)
    store.adapters.hold(digest, at)
    assert store.adapters.serve(now)
    return now


def test_an_adapter_is_found_by_id_and_name_and_only_by_its_account(store: SqlStore) -> None:
    mine = made()
    store.adapters.create(mine, 100)
    assert store.adapters.find("acct", mine.id) == store.adapters.find("acct", "mine") == mine
    assert mine.status == "waiting" and mine.missing == (CONFIG, WEIGHTS)
    assert store.adapters.find("other", mine.id) is None and store.adapters.find("other", "mine") is None
    assert store.adapters.own("acct") == [mine] and store.adapters.own("other") == []


def test_names_are_one_accounts_and_so_is_their_number(store: SqlStore) -> None:
    store.adapters.create(made(), 2)
    with pytest.raises(AdapterTaken, match="/versions"):
        store.adapters.create(made(), 2)
    theirs = made("other")
    store.adapters.create(theirs, 2)
    assert store.adapters.find("other", "mine") == theirs
    store.adapters.create(made(name="second"), 2)
    with pytest.raises(AdapterError, match="Delete one"):
        store.adapters.create(made(name="third"), 2)
    assert len(store.adapters.own("acct")) == 2


def test_public_ones_are_for_all_once_they_can_be_used_and_ones_own_come_first(store: SqlStore) -> None:
    shared = made(public=True)
    store.adapters.create(shared, 9)
    assert store.adapters.find("other", "mine") is None and store.adapters.public(10) == []
    shared = served(store, shared, A)
    assert store.adapters.find("other", "mine") == store.adapters.find("other", shared.id) == shared
    later = made("third", at=200.0, public=True)
    store.adapters.create(later, 9)
    later = served(store, later, B, at=50.0)
    assert store.adapters.find("other", "mine") == shared
    assert [one.id for one in store.adapters.public(10)] == [shared.id, later.id]
    assert [one.id for one in store.adapters.public(1, 1)] == [later.id]
    assert [one.id for one in store.adapters.public(1, order="modified")] == [later.id]
    own = made("other", at=300.0)
    store.adapters.create(own, 9)
    assert store.adapters.find("other", "mine") == own
    # Nobody but its owner changes one.
    assert store.adapters.change("other", shared.id, public=False) is None
    assert not store.adapters.remove("other", shared.id, 1.0)
    assert store.adapters.change("acct", shared.id, public=False) == replace(shared, public=False)
    assert store.adapters.find("fourth", shared.id) is None


def test_a_version_is_put_in_the_place_of_the_one_before_and_of_no_other(store: SqlStore) -> None:
    first = made()
    store.adapters.create(first, 9)
    first = served(store, first, A)
    opened = store.adapters.change("acct", first.id, opened=True, config="{}")
    assert opened is not None and opened.status == "ready" and opened.missing == (WEIGHTS,)
    second = served(store, opened, B)
    assert store.adapters.find("acct", "mine") == second and second.version == 2
    # Of two that were checked at the same time one is.
    assert not store.adapters.serve(replace(second, digest="c" * 64))
    assert store.adapters.remove("acct", first.id, 1.0)
    assert not store.adapters.serve(replace(second, version=3))


def test_blobs_go_when_nobody_has_had_their_content_for_a_while(store: SqlStore) -> None:
    first, second = made(), made("other")
    for one in (first, second):
        store.adapters.create(one, 9)
        served(store, one, A, at=100.0)
    gone: list[str] = []
    store.adapters.sweep(100.0 + 10 * KEPT_S, gone.append)
    assert store.adapters.remove("acct", first.id, 200.0)
    store.adapters.sweep(200.0 + KEPT_S + 1, gone.append)
    assert gone == []
    assert store.adapters.remove("other", second.id, 300.0)
    store.adapters.sweep(300.0 + KEPT_S - 1, gone.append)
    assert gone == []
    # Whoever writes them again keeps them.
    store.adapters.hold(A, 400.0)
    store.adapters.sweep(300.0 + KEPT_S + 1, gone.append)
    assert gone == []

    def failing(digest: str) -> None:
        raise OSError("the disk is away")

    with pytest.raises(AdapterError, match="the disk is away"):
        store.adapters.sweep(400.0 + KEPT_S + 1, failing)
    store.adapters.sweep(400.0 + KEPT_S + 1, gone.append)
    store.adapters.sweep(400.0 + KEPT_S + 1, gone.append)
    assert gone == [A]


def test_a_replaced_version_leaves_its_blobs(store: SqlStore) -> None:
    first = made()
    store.adapters.create(first, 9)
    first = served(store, first, A, at=100.0)
    opened = store.adapters.change("acct", first.id, opened=True)
    assert opened is not None
    served(store, opened, B, at=500.0)
    gone: list[str] = []
    store.adapters.sweep(100.0 + KEPT_S + 1, gone.append)
    assert gone == []
    store.adapters.sweep(500.0 + KEPT_S + 1, gone.append)
    assert gone == [A]


def test_an_accounts_adapters_go_with_it(store: SqlStore) -> None:
    store.accounts.ensure("acct")
    mine, theirs = made(), made("other")
    for one in (mine, theirs):
        store.adapters.create(one, 9)
    mine = served(store, mine, A)
    before = store.revisions()["adapters"]
    store.accounts.remove("acct")
    assert store.adapters.own("acct") == [] and store.adapters.own("other") == [theirs]
    assert store.revisions()["adapters"] > before
    gone: list[str] = []
    store.adapters.sweep(time.time() + KEPT_S + 1, gone.append)
    assert gone == [A]


def test_what_was_looked_up_is_known_until_something_changes(store: SqlStore) -> None:
    mine = made()
    store.adapters.create(mine, 9)
    reader = ReadPool()
    book = AdapterBook(store.adapters, reader)

    async def look() -> None:
        # One that cannot be used yet is asked for again, so that it is found as soon as it can be.
        found = await book.find("acct", "mine")
        assert found == mine
        now = served(store, mine, A)
        assert await book.find("acct", "mine") == now
        store.adapters.remove("acct", mine.id, 1.0)
        assert await book.find("acct", "mine") == now
        book.forget()
        assert await book.find("acct", "mine") is None

    try:
        asyncio.run(look())
    finally:
        reader.close()


def test_what_is_read_while_something_changes_is_not_kept(store: SqlStore) -> None:
    mine = made()
    store.adapters.create(mine, 9)
    mine = served(store, mine, A)
    reader = ReadPool()
    book = AdapterBook(store.adapters, reader)
    find = store.adapters.find

    def slow(account: str, which: str) -> Adapter | None:
        found = find(account, which)
        store.adapters.remove("acct", mine.id, 1.0)
        book.forget()
        return found

    async def look() -> None:
        store.adapters.find = slow  # type: ignore[method-assign]
        assert await book.find("acct", "mine") == mine
        store.adapters.find = find  # type: ignore[method-assign]
        assert await book.find("acct", "mine") is None

    try:
        asyncio.run(look())
    finally:
        reader.close()


def test_a_change_at_one_gateway_is_noticed_at_another(
    open_store: Callable[..., SqlStore], database: str, tmp_path: Path
) -> None:
    store = open_store("a")
    store.open()
    mine = made()
    store.adapters.create(mine, 9)
    served(store, mine, A)
    state = State(tmp_path / "b", "local", (), database=database or None)

    async def watch() -> None:
        await state.start()
        found = await state.adapters.find("acct", "mine")
        assert found is not None
        store.adapters.remove("acct", mine.id, time.time())

        async def gone() -> bool:
            return await state.adapters.find("acct", "mine") is None

        await until(gone)

    try:
        asyncio.run(watch())
    finally:
        state.close()


def test_content_is_named_after_both_files() -> None:
    def digest(config: bytes, weights: bytes) -> str:
        found = content_digest(config, len(weights))
        found.update(weights)
        return found.hexdigest()

    assert digest(b"ab", b"c") != digest(b"a", b"bc") != digest(b"", b"abc")
    assert digest(b"ab", b"c") == digest(b"ab", b"c")
    assert blob("0" * 64, CONFIG) == f"adapters/{'0' * 64}/adapter_config.json"
