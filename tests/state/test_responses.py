"""Stored responses: chains, owners, bounds, and several gateways on one file."""

from __future__ import annotations

import stat
import uuid
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.errors import InvalidInput, NotFound
from serve_app.state.responses import ResponseStore


def response(previous: str | None = None) -> dict[str, Any]:
    return {"id": f"resp_{uuid.uuid4().hex}", "previous_response_id": previous, "output": []}


def turn(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": f"re {text}"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.sqlite3"


async def test_a_conversation_is_the_chain_of_its_turns(path):
    store, other = ResponseStore(path), ResponseStore(path)
    first, second, branch = response(), None, None
    second, branch = response(first["id"]), response(first["id"])
    await store.put("a", first, turn("one"))
    await other.put("a", second, turn("two"))
    await store.put("a", branch, turn("else"))
    assert await store.conversation("a", None) == []
    # What one gateway stored, another finds.
    assert await other.conversation("a", first["id"]) == turn("one")
    assert await store.conversation("a", second["id"]) == turn("one") + turn("two")
    assert await other.conversation("a", branch["id"]) == turn("one") + turn("else")
    assert await ResponseStore(path).get("a", second["id"]) == second


async def test_an_account_sees_its_own_only(path):
    store = ResponseStore(path)
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
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_gap_in_the_chain_is_told(path):
    store = ResponseStore(path)
    first = response()
    second = response(first["id"])
    await store.put("a", first, turn("one"))
    await store.put("a", second, turn("two"))
    await store.delete("a", first["id"])
    with pytest.raises(NotFound):
        await store.get("a", first["id"])
    with pytest.raises(InvalidInput, match=first["id"]):
        await store.conversation("a", second["id"])


@pytest.mark.parametrize("bounds", [{"max_count": 10}, {"max_bytes": 2000}])
async def test_the_oldest_go_first(path, bounds):
    store = ResponseStore(path, **bounds)
    await store.put("b", kept := response(), turn("another account's"))
    stored = [response() for _ in range(65)]
    for one in stored:
        await store.put("a", one, turn("x"))

    async def found(one: dict[str, Any]) -> bool:
        try:
            return bool(await store.get("a", one["id"]))
        except NotFound:
            return False

    alive = [await found(one) for one in stored]
    assert alive == sorted(alive) and alive[-1] and not alive[0]
    # Bounds are looked at every 32nd time.
    assert sum(alive) <= 10 + 32
    assert await store.get("b", kept["id"])


async def test_age(path):
    store = ResponseStore(path, max_age_s=-1)
    await store.put("a", one := response(), turn("x"))
    with pytest.raises(NotFound):
        await store.get("a", one["id"])


async def test_a_long_chain_ends(path, monkeypatch):
    monkeypatch.setattr("serve_app.state.responses.MAX_TURNS", 3)
    store = ResponseStore(path)
    previous = None
    for _ in range(6):
        one = response(previous)
        await store.put("a", one, turn("x"))
        previous = one["id"]
    with pytest.raises(InvalidInput, match="turns back"):
        await store.conversation("a", previous)
