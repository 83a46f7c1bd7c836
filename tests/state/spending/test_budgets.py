"""A budget under 64 hostile clients on gateways that die: not one neuron above, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.api.errors import BudgetSpent, StoreAway
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import MICRO, Limits
from serve_app.state.errors import Away
from serve_app.state.owners import Owner
from serve_app.state.spending.allowance import Allowance, Worst
from serve_app.state.spending.leases import FRESH_S
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.quotas import NEURONS, Quota
from serve_app.state.store.spending import spent
from serve_app.state.store.sql import SqlStore

BUDGET = 1000 * MICRO
CALLER = Caller("team-a", key="k1", account_limits=Limits(neurons_per_day=BUDGET))
NOON = 1_795_262_400.0
CLIENTS, KILLS = 64, 4


class Dying:
    """The store as a gateway sees it that may die at any moment: before it has asked, and before it has heard."""

    def __init__(self, store: SqlStore, seed: int) -> None:
        self._leases = store.leases
        self._random = random.Random(seed)
        self.away_s = 0.0
        self.dead = False
        self.lossy = 0.02

    def lease(self, owner, now, wants):
        if self.dead and self._random.random() < 0.5:
            raise Away("dead")
        found = self._leases.lease(owner, now, wants)
        if self.dead or self._random.random() < self.lossy:
            # The store has it, and the gateway does not know.
            raise Away("lost on its way back")
        return found

    def forget(self, owner):
        if self.dead:
            raise Away("dead")
        self._leases.forget(owner)

    def trim(self, now):
        self._leases.trim(now)


class Gateway:
    def __init__(self, number: int, store: SqlStore, folder: Path, clock: Callable[[], float]) -> None:
        self.door = Dying(store, number)
        self.store = store
        self.owner = Owner(folder)
        self.journal: list[Entry] = []
        self.allowance = Allowance(self.door, self.owner, clock=clock)

    def write(self) -> None:
        """Part of the journal reaches the store, perhaps twice."""
        some = self.journal[:20]
        self.store.write([entry.row() for entry in some])
        self.store.write([entry.row() for entry in some[:3]])
        del self.journal[: len(some)]

    def kill(self) -> None:
        self.door.dead = True
        self.allowance.close()


async def client(number: int, gateways: list[Gateway], killing: asyncio.Future[None]) -> int:
    """Asks for as much as it can until nobody is killed any more and it is refused three times in a row; sometimes it
    is gone before it is let in. How many of its requests ran.
    """
    random_, refused, ran = random.Random(number), 0, 0
    while refused < 3 or not killing.done():
        gateway = random_.choice(gateways)
        worst = random_.randrange(MICRO // 10, 4 * MICRO)
        waiting = asyncio.ensure_future(gateway.allowance.reserve(CALLER, Worst(neurons=worst)))
        if random_.random() < 0.1:
            await asyncio.sleep(0.001)
            waiting.cancel()
        try:
            reservation = await waiting
        except BudgetSpent as error:
            assert error.code == 3036 and error.status == 429
            refused += 1
            await asyncio.sleep(0.05)
            continue
        except (asyncio.CancelledError, StoreAway):
            await asyncio.sleep(0.001)
            continue
        refused = 0
        await asyncio.sleep(random_.random() * 0.01)
        if gateway.door.dead:
            continue  # its stream broke
        used = random_.choice([worst, worst, random_.randrange(worst), 0])
        ran += 1
        name = f"{number}-{ran}"
        if used:
            now = NOON + ran / 1000
            units: dict[str, int] = {}
            entry = Entry(name, "team-a", "k1", now, 0.0, "m", "t", "done", units, used, 0, "USD")
            gateway.journal.append(entry)
        reservation.settle({NEURONS: used}, name if used else "")
    return ran


@pytest.mark.parametrize("seed", [1])
async def test_not_one_neuron_above(store, tmp_path, seed):
    random_, began, ends = random.Random(seed), time.monotonic(), asyncio.Event()
    folder, ahead = tmp_path / "gateways", 0.0

    def clock() -> float:
        return NOON + time.monotonic() - began + ahead

    gateways = [Gateway(n, store, folder, clock) for n in range(2)]
    every = list(gateways)

    async def keep_books() -> None:
        while not ends.is_set():
            for gateway in list(gateways):
                await asyncio.to_thread(gateway.write)
            await asyncio.sleep(0.01)

    async def kill() -> None:
        """The clock is set forward and back meanwhile, by an hour."""
        nonlocal ahead
        for n in range(KILLS):
            ahead = (0.0, 3600.0, 0.0, -3600.0)[n % 4]
            await asyncio.sleep(0.1)
            place = random_.randrange(2)
            dead, gateways[place] = gateways[place], Gateway(100 + n, store, folder, clock)
            every.append(gateways[place])
            await asyncio.to_thread(dead.kill)
            dead.owner.close()
            await asyncio.sleep(0.02)
            await asyncio.to_thread(adopt)

    def adopt() -> None:
        """Another gateway of the node brings to the ledger what the dead wrote down, then gives back their leases."""
        with gateways[0].owner.ended() as ended:
            for one in [one for one in every if one.owner.id in ended]:
                while one.journal:
                    one.write()
                store.leases.forget(one.owner.id)
                gateways[0].owner.forget(one.owner.id)

    booking = asyncio.ensure_future(keep_books())
    killing = asyncio.ensure_future(kill())
    ran = await asyncio.gather(*(client(n, gateways, killing) for n in range(CLIENTS)))
    await killing
    ends.set()
    await booking
    quota = Quota("team-a", "", NEURONS)

    def total() -> int:
        with store.database.reading() as connection:
            return spent.since(connection, quota, int(NOON) // 86400 * 86400)

    for gateway in gateways:
        while gateway.journal:
            gateway.write()
    assert sum(ran) > 50
    assert BUDGET * 0.5 < total() <= BUDGET
    # All that is left can still be had, by one gateway, and not a millionth of a neuron more.
    for gateway in gateways:
        gateway.door.lossy = 0.0
    await asyncio.to_thread(gateways[1].allowance.close)
    gateways[1].owner.close()
    adopt()
    # What was refused is refused from memory for a moment.
    await asyncio.sleep(FRESH_S)
    left = BUDGET - total()
    with pytest.raises(BudgetSpent, match=r"The daily budget of this account is 1000 in neurons.*could cost up to"):
        await gateways[0].allowance.reserve(CALLER, Worst(neurons=left + 1))
    whole = await gateways[0].allowance.reserve(CALLER, Worst(neurons=left))
    whole.settle({})
    await asyncio.to_thread(gateways[0].allowance.close)
    adopt()
    # Nothing is leased any more, and no file of a gateway is left.
    assert not any(folder.glob("*.gateway"))
