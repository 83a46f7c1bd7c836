"""Stored responses over several nodes: found wherever they are, and never another account's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.api.errors import InvalidInput, NotFound
from serve_app.state.peers import Peers
from serve_app.state.response_peers import PeerResponses
from serve_app.state.responses import ResponseStore
from tests.state.test_responses import response, turn


def nodes(tmp_path: Path, count: int) -> list[PeerResponses]:
    found: list[PeerResponses] = []

    async def ask(method: str, wire: dict[str, Any]) -> list[Any]:
        return [await node.answer(method, wire) for node in found]

    found += [PeerResponses(ResponseStore(tmp_path / f"{i}.sqlite3"), Peers(ask)) for i in range(count)]
    return found


async def test_a_conversation_goes_on_wherever_its_turns_are(tmp_path):
    a, b, c = nodes(tmp_path, 3)
    first = response()
    second = response(first["id"])
    third = response(second["id"])
    fourth = response(third["id"])
    for node, body, text in ((a, first, "one"), (b, second, "two"), (b, third, "three"), (a, fourth, "four")):
        await node.put("acc", body, turn(text))
    whole = turn("one") + turn("two") + turn("three") + turn("four")
    for node in (a, b, c):
        assert await node.conversation("acc", fourth["id"]) == whole
        assert await node.get("acc", third["id"]) == third
        with pytest.raises(NotFound):
            await node.get("other", third["id"])
        with pytest.raises(InvalidInput):
            await node.conversation("other", third["id"])
    assert await c.conversation("acc", None) == []
    await c.delete("acc", second["id"])
    with pytest.raises(NotFound):
        await a.delete("acc", second["id"])
    with pytest.raises(InvalidInput, match=second["id"]):
        await a.conversation("acc", fourth["id"])


async def test_gateways_that_do_not_answer_have_nothing(tmp_path):
    async def broken(method: str, wire: dict[str, Any]) -> list[Any]:
        raise RuntimeError("gone")

    alone = PeerResponses(ResponseStore(tmp_path / "x.sqlite3"), Peers(broken))
    kept = response()
    await alone.put("acc", kept, turn("one"))
    assert await alone.conversation("acc", kept["id"]) == turn("one")
    with pytest.raises(NotFound):
        await alone.get("acc", response()["id"])
    with pytest.raises(InvalidInput):
        await alone.conversation("acc", response(kept["id"])["id"])
