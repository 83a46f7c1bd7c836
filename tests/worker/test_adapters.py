"""Which adapter is in memory and has a place: of a bank that only remembers, so that every order can be tried."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pytest

from serve_app.adapters.config import AdapterRefused
from serve_app.wire.generate import AdapterAt
from serve_app.worker.adapters import NICE, Adapters


def at(number: int, size: int = 10) -> AdapterAt:
    return AdapterAt(f"{number:064x}", size)


@dataclass(slots=True)
class Packed:
    digest: str
    bytes: int


class World:
    """A bank, a store of adapters and an engine's thread that is this one: ``used[place]`` requests run there."""

    def __init__(self, places: int = 2, cache_bytes: int = 1000) -> None:
        self.places = places
        self.there: dict[int, str] = {}
        self.used: Counter[int] = Counter()
        self.loads: Counter[str] = Counter()
        self.priorities: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.lost: list[tuple[str, str]] = []
        self.adapters = Adapters(
            self, self._load, self._between_steps, lambda *told: self.lost.append(told), cache_bytes=cache_bytes
        )

    def put(self, place: int, packed: Packed) -> None:
        assert 1 <= place <= self.places and not self.used[place]
        if packed.digest == at(13).digest:
            raise MemoryError("no room in the model")
        self.there[place] = packed.digest

    def clear(self, place: int) -> None:
        assert not self.used[place]
        del self.there[place]

    def _load(self, wanted: AdapterAt) -> Packed:
        assert self.gate.wait(20)
        self.loads[wanted.digest] += 1
        self.priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if self.error is not None:
            raise self.error
        return Packed(wanted.digest, 2 * wanted.size)

    def _between_steps(self, function) -> Future[None]:
        future: Future[None] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def place(self, name: str, wanted: AdapterAt) -> asyncio.Task[int]:
        ended = asyncio.get_running_loop().create_future()
        return asyncio.ensure_future(self.adapters.place(name, wanted, ended))


@pytest.fixture
def world():
    world = World()
    yield world
    world.adapters.close()


async def settled(task: asyncio.Task[int]) -> bool:
    """Whether it has ended once nothing moves any more: loads included."""
    await asyncio.wait([task], timeout=0.05)
    return task.done()


async def test_requests_for_one_cold_adapter_share_a_load_and_a_place(world):
    world.gate.clear()
    tasks = [world.place(f"r{n}", at(1)) for n in range(5)]
    assert not await settled(tasks[0])
    world.gate.set()
    assert set(await asyncio.gather(*tasks)) == {1} and world.loads[at(1).digest] == 1
    assert world.there == {1: at(1).digest}
    assert await world.place("another", at(1)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
async def test_a_load_stands_behind_the_step(world):
    """It gets what the step's threads leave, which have the process's priority."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    await world.place("a", at(1))
    assert world.priorities == {min(19, own + NICE)} and os.getpriority(os.PRIO_PROCESS, 0) == own


async def test_the_place_used_least_recently_is_taken(world):
    for n in (1, 2, 1):
        assert await world.place(f"a{n}", at(n)) == n
        world.adapters.release(f"a{n}")
    assert await world.place("c", at(3)) == 2
    assert world.there == {1: at(1).digest, 2: at(3).digest}
    # What has lost its place is still in memory.
    world.adapters.release("c")
    assert await world.place("b", at(2)) == 1 and world.loads[at(2).digest] == 1


async def test_who_waits_longest_gets_the_place_that_is_used_by_fewest(world):
    for name, n in (("a", 1), ("b", 2), ("b2", 2)):
        await world.place(name, at(n))
    third, fourth = world.place("c", at(3)), world.place("d", at(4))
    assert not await settled(third) and not await settled(fourth)
    # The first adapter's place will be the third's: who comes for the first now waits in turn.
    late = world.place("a2", at(1))
    assert not await settled(late) and await world.place("b3", at(2)) == 2
    world.adapters.release("a")
    assert await third == 1
    # And then the fourth's turn, with the place of one request, not of three.
    assert not await settled(fourth) and not await settled(late)
    world.adapters.release("c")
    assert await fourth == 1
    for name in ("b", "b2", "b3"):
        world.adapters.release(name)
    assert await late == 2


async def test_who_leaves_does_not_hold_others_up(world):
    await world.place("a", at(1))
    await world.place("b", at(2))
    ended = asyncio.get_running_loop().create_future()
    third = asyncio.ensure_future(world.adapters.place("c", at(3), ended))
    fourth = world.place("d", at(4))
    assert not await settled(third)
    ended.set_result(None)
    assert await third == 0
    fourth.cancel()
    await asyncio.wait([fourth])
    assert world.adapters.stats()["waiting"] == 0
    # Nobody waits for it any more: its place takes new requests again.
    assert await world.place("a2", at(1)) == 1 and await world.place("b2", at(2)) == 2


@pytest.mark.parametrize("error", [AdapterRefused("its files are gone"), OSError("the store is away")])
async def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again(world, error):
    world.error = error
    for task in [world.place(f"r{n}", at(1)) for n in range(3)]:
        with pytest.raises(type(error), match=str(error)):
            await task
    assert world.loads[at(1).digest] == 1
    world.error = None
    assert await world.place("again", at(1)) == 1


async def test_an_adapter_that_the_model_does_not_take_ends_its_requests(world):
    assert await world.place("r", at(13)) == 1
    await asyncio.sleep(0)
    assert [name for name, _ in world.lost] == ["r"] and "no room in the model" in world.lost[0][1]
    world.adapters.release("r")
    assert await world.place("s", at(2)) == 1 and world.adapters.stats()["using"] == 1


async def test_memory_is_bounded(world):
    world = World(places=8, cache_bytes=100)
    try:
        for n in range(20):
            await world.place(f"r{n}", at(n + 20))
            assert world.adapters.bytes <= 100
            world.adapters.release(f"r{n}")
        assert world.adapters.stats()["held"] == 5 and len(world.there) == 5
        with pytest.raises(AdapterRefused, match="lora.cache_bytes"):
            await world.place("large", at(1, size=101))
        # In use, it stays: whoever needs the room waits for its end.
        for n in range(5):
            await world.place(f"u{n}", at(n + 35))
        more = world.place("more", at(50))
        assert not await settled(more) and world.adapters.bytes == 100
        world.adapters.release("u3")
        assert await more and world.adapters.bytes <= 100
    finally:
        world.adapters.close()


async def test_an_expected_adapter_is_loaded_and_puts_no_other_out(world):
    world = World(cache_bytes=40)
    try:
        world.adapters.expect(at(1))
        while not world.adapters.held:
            await asyncio.sleep(0)
        assert world.there == {}
        await world.place("a", at(1))
        await world.place("b", at(2))
        world.adapters.expect(at(3))
        assert sorted(world.adapters.held) == [at(1).digest, at(2).digest] and world.loads[at(3).digest] == 0
    finally:
        world.adapters.close()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_everybody_gets_a_place_and_none_is_taken_from_under_a_request(seed):
    """Requests for twelve adapters of several sizes, some of which leave early, over three places and little memory."""
    draw = np.random.default_rng(seed)
    world = World(places=3, cache_bytes=150)
    runs: list[int] = []

    async def request(number: int) -> None:
        which = int(draw.zipf(1.6)) % 12 + 20
        ended = asyncio.get_running_loop().create_future()
        name, leaves = f"r{number}", draw.random() < 0.2
        if leaves:
            asyncio.get_running_loop().call_later(draw.random() * 0.01, lambda: ended.done() or ended.set_result(None))
        try:
            place = await world.adapters.place(name, at(which, size=5 + which), ended)
            if not place:
                return
            assert world.there[place] == at(which).digest
            world.used[place] += 1
            for _ in range(int(draw.integers(1, 5))):
                await asyncio.sleep(0)
                assert world.there[place] == at(which).digest and world.adapters.bytes <= 150
            world.used[place] -= 1
            runs.append(number)
        finally:
            ended.cancel()
            world.adapters.release(name)

    async def arrivals() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(300):
                group.create_task(request(number))
                if number % 20 == 0:
                    await asyncio.sleep(0)

    try:
        await asyncio.wait_for(arrivals(), 60)
        stats = world.adapters.stats()
        assert len(runs) >= 200 and (stats["using"], stats["waiting"]) == (0, 0) and stats["evicted"] > 0
    finally:
        world.adapters.close()
