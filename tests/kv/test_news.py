"""What a pool has let go is told to whoever asks, in its order, and not for ever."""

from __future__ import annotations

import asyncio

from serve_app.kv import news
from serve_app.kv.news import Departures
from tests.kv.chunks import LAYOUT, cut, root


def never(key: bytes) -> bool:
    return False


async def test_keys_are_told_once_and_only_of_the_layout_asked_for() -> None:
    gone = Departures()
    number, keys = await gone.since(-1, LAYOUT.name, 0.0)
    assert (number, keys) == (0, [])
    [first, second] = cut(list(range(512)), root(), LAYOUT)
    gone.add([first], never)
    number, keys = await gone.since(number, LAYOUT.name, 0.0)
    assert keys == list(first.block_keys) and await gone.since(number, LAYOUT.name, 0.0) == (number, [])
    # A key that another chunk has is not gone.
    gone.add([second], lambda key: key == second.block_keys[0])
    assert (await gone.since(0, LAYOUT.name, 0.0))[1] == [*first.block_keys, *second.block_keys[1:]]
    assert await gone.since(0, "another", 0.0) == (15, [])


async def test_who_asks_waits_for_the_next_and_who_is_late_misses_some(monkeypatch) -> None:
    monkeypatch.setattr(news, "TOGETHER_S", 0.0)
    gone = Departures(kept=10)
    [first, second] = cut(list(range(512)), root(), LAYOUT)
    asking = asyncio.ensure_future(gone.since(0, LAYOUT.name, 60.0))
    await asyncio.sleep(0)
    gone.add([first], never)
    assert await asyncio.wait_for(asking, 20) == (8, list(first.block_keys))
    gone.add([second], never)
    assert await gone.since(0, LAYOUT.name, 0.0) == (16, [*first.block_keys[6:], *second.block_keys])
