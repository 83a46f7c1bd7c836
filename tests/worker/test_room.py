"""Room for what requests hold beside their K/V."""

import asyncio
import random

import pytest

from serve_app.worker.room import Room

pytestmark = pytest.mark.asyncio


async def test_who_finds_no_room_waits_and_nobody_is_overtaken():
    room = Room(10)
    first, second, third = (room.take(count) for count in (6, 6, 1))
    assert first.done() and not second.done() and not third.done() and room.used == 6
    room.give(6)
    assert second.done() and third.done() and room.used == 7
    room.give(7)
    assert room.used == 0


async def test_more_than_there_is_comes_in_alone():
    room = Room(10)
    small, large, next_one = room.take(1), room.take(50), room.take(1)
    assert small.done() and not large.done()
    room.give(1)
    assert large.done() and not next_one.done() and room.used == 50
    room.give(50)
    assert next_one.done() and room.used == 1


async def test_who_gives_up_makes_way_and_nothing_is_lost():
    room, chance = Room(100), random.Random(7)
    most = 0

    async def one() -> None:
        nonlocal most
        count = chance.randrange(1, 60)
        taken = room.take(count)
        try:
            await asyncio.wait_for(taken, chance.choice((0.001, 5)))
        except TimeoutError:
            return
        most = max(most, room.used)
        await asyncio.sleep(chance.random() / 500)
        room.give(count)

    await asyncio.gather(*(one() for _ in range(200)))
    assert room.used == 0 and 50 < most <= 100
