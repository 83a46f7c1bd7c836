"""Leases: several gateways over one real store never let in more than a limit, and nearly all of it."""

from __future__ import annotations

import random

import pytest

from serve_app.state.errors import Away
from serve_app.state.spending.leases import IDLE_S, Leases, Reservation, Short
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.quotas import MONEY, NEURONS, REQUESTS, STREAMS, TOKENS, Need, Quota
from serve_app.state.store.sql import SqlStore

# 2026-11-21, 12:00 UTC.
NOON = 1_795_262_400.0


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Gone:
    away_s = 0.0

    def lease(self, owner, now, wants):
        raise Away("gone")


class Lost:
    """A store whose answer never arrives."""

    away_s = 0.0

    def __init__(self, store: SqlStore) -> None:
        self._leases = store.leases

    def lease(self, owner, now, wants):
        self._leases.lease(owner, now, wants)
        raise Away("lost on its way back")


def need(kind: str, limit: int, amount: int = 1, *, account: str = "a", key: str = "") -> Need:
    return Need(Quota(account, key, kind), limit, amount)


def entry(
    name: str, at: float, neurons: int, account: str = "a", key: str = "k", money: int = 0, currency: str = "USD"
) -> Entry:
    return Entry(name, account, key, at, 1.0, "m", "text-generation", "done", {}, neurons, money, currency)


class Gateway:
    """One gateway's leases, on a store that it exchanges with when it has to, and at each ``poll``."""

    def __init__(self, name: str, store: SqlStore, clock: Clock) -> None:
        self.name, self.store, self.leases = name, store, Leases(clock=clock)
        self.journal: list[Entry] = []

    def poll(self) -> None:
        self.leases.exchange(self.store.leases, self.name)

    def let_in(self, *needs: Need) -> Reservation | None:
        found = self.leases.take(needs)
        if found is None:
            with self.leases.waiting(needs):
                self.poll()
                found = self.leases.take(needs)
        return found if isinstance(found, Reservation) else None

    def let_in_with(self, other: Gateway, *needs: Need) -> Reservation | None:
        """:meth:`let_in` of a request that waits until ``other`` has given back what it does not use."""
        with self.leases.waiting(needs):
            for gateway in (self, other, self):
                gateway.poll()
            found = self.leases.take(needs)
        return found if isinstance(found, Reservation) else None

    def write(self) -> None:
        """The journal reaches the store."""
        self.store.write([one.row() for one in self.journal])
        self.journal.clear()


def test_four_gateways_let_in_a_minute_what_the_limit_says(store):
    """480 requests a minute over four gateways against a limit of 300, for four minutes of a clock that only this test
    moves: never one more, and no more than 2 % fewer.
    """
    clock, random_ = Clock(), random.Random(1)
    gateways = [Gateway(f"g{n}", store, clock) for n in range(4)]
    for _ in range(4):
        let = 0
        for _ in range(12):
            for _ in range(40):
                gateway = random_.choice(gateways)
                if (taken := gateway.let_in(need(REQUESTS, 300))) is not None:
                    taken.settle({REQUESTS: 1})
                    let += 1
            clock.now += 5
            for gateway in gateways:
                gateway.poll()
        assert 294 <= let <= 300, let


def test_a_request_within_its_lease_asks_nobody(store):
    clock = Clock()
    gateway = Gateway("g", store, clock)
    for _ in range(20):
        gateway.let_in(need(REQUESTS, 3000)).settle({REQUESTS: 1})
        clock.now += 0.01
        gateway.poll()
    gateway.store = None
    assert isinstance(gateway.leases.take([need(REQUESTS, 3000)]), Reservation)


def test_what_is_refused_is_refused_from_memory_for_a_moment(store):
    clock = Clock()
    gateway = Gateway("g", store, clock)
    for _ in range(3):
        gateway.let_in(need(REQUESTS, 3)).settle({REQUESTS: 1})
    assert gateway.let_in(need(REQUESTS, 3)) is None
    found = gateway.leases.take([need(REQUESTS, 3)])
    assert isinstance(found, Short) and found.left == 0
    # Later only the store can tell, and a minute later there is room again.
    clock.now += 1
    assert gateway.leases.take([need(REQUESTS, 3)]) is None
    clock.now += 60
    assert gateway.let_in(need(REQUESTS, 3)) is not None


def test_tokens_that_were_reserved_and_not_used_come_back(store):
    clock = Clock()
    one, two = Gateway("one", store, clock), Gateway("two", store, clock)
    running = one.let_in(need(TOKENS, 1000, 900))
    assert one.let_in(need(TOKENS, 1000, 200)) is None and two.let_in(need(TOKENS, 1000, 200)) is None
    running.settle({TOKENS: 300})
    one.poll()
    clock.now += 1
    assert two.let_in_with(one, need(TOKENS, 1000, 701)) is None
    assert two.let_in_with(one, need(TOKENS, 1000, 700)) is not None
    assert one.let_in(need(TOKENS, 1000, 1)) is None


def test_streams_come_back_when_they_end_and_when_their_gateway_does(store):
    clock = Clock()
    one, two = Gateway("one", store, clock), Gateway("two", store, clock)
    running = [one.let_in(need(STREAMS, 3)) for _ in range(3)]
    assert all(running) and two.let_in(need(STREAMS, 3)) is None
    running[0].settle({})
    # What is settled twice is given back once.
    running[0].settle({})
    one.poll()
    clock.now += 1
    assert two.let_in(need(STREAMS, 3)) is not None and two.let_in(need(STREAMS, 3)) is None
    store.leases.forget("one")
    clock.now += 1
    assert two.let_in(need(STREAMS, 3, 2)) is not None
    # One that is silent for long is gone as well.
    clock.now += 20
    assert Gateway("three", store, clock).let_in(need(STREAMS, 3, 3)) is not None


def test_all_limits_of_a_request_or_none(store):
    clock = Clock()
    gateway = Gateway("g", store, clock)
    both = [need(TOKENS, 1000, 100), need(STREAMS, 1)]
    first = gateway.let_in(*both)
    assert first is not None and gateway.let_in(*both) is None
    assert gateway.leases.held()[both[0].quota][0] == 100
    first.settle({TOKENS: 0})
    assert gateway.leases.held()[both[0].quota][0] == 0


def test_a_key_has_limits_of_its_own_within_its_account(store):
    clock = Clock()
    gateway = Gateway("g", store, clock)
    for key in ("k1", "k2"):
        needs = [need(REQUESTS, 5), need(REQUESTS, 3, key=key)]
        let = sum(gateway.let_in(*needs) is not None for _ in range(4))
        assert let == {"k1": 3, "k2": 2}[key]


def test_a_budget_counts_what_the_ledger_has_and_what_is_on_its_way(store):
    clock = Clock()
    one, two = Gateway("one", store, clock), Gateway("two", store, clock)
    running = one.let_in(need(NEURONS, 1000, 600))
    assert two.let_in(need(NEURONS, 1000, 500)) is None
    running.settle({NEURONS: 250}, "r1")
    one.journal.append(entry("r1", clock.now, 250))
    for _ in range(2):
        # Its entry waits in the journal: 250 are held until the ledger has it.
        one.poll()
        assert one.leases.held()[Quota("a", "", NEURONS)][0] == 250
        clock.now += 1
        assert two.let_in_with(one, need(NEURONS, 1000, 751)) is None
    one.write()
    assert two.let_in(need(NEURONS, 1000, 751)) is None
    one.poll()
    assert one.leases.held()[Quota("a", "", NEURONS)][0] == 0
    clock.now += 1
    assert two.let_in_with(one, need(NEURONS, 1000, 751)) is None
    assert two.let_in_with(one, need(NEURONS, 1000, 750)) is not None


def test_an_entry_is_taken_off_a_lease_once_however_often_the_answer_is_lost(store):
    clock = Clock()
    one, two = Gateway("one", store, clock), Gateway("two", store, clock)
    one.let_in(need(NEURONS, 1000, 100)).settle({NEURONS: 100}, "a1")
    assert one.let_in(need(NEURONS, 1000, 500)) is not None
    # One has nothing leased ahead any more.
    clock.now += IDLE_S + 1
    one.poll()
    two.let_in(need(NEURONS, 1000, 400)).settle({NEURONS: 400}, "b1")
    store.write([entry("a1", clock.now, 100).row(), entry("b1", clock.now, 400).row()])
    # Meanwhile what is two's counts twice: in the ledger, and as its lease.
    for _ in range(3):
        clock.now += 1
        with pytest.raises(Away):
            one.leases.exchange(Lost(store), "one")
    two.poll()
    clock.now += 1
    assert two.let_in(need(NEURONS, 1000, 1)) is None
    one.poll()
    assert one.leases.held()[Quota("a", "", NEURONS)] == (500, 500)
    clock.now += 1
    assert two.let_in(need(NEURONS, 1000, 1)) is None


def test_a_key_spends_its_own_budget_and_its_accounts(store):
    clock = Clock()
    store.write([entry("r1", clock.now, 400, key="k1").row(), entry("r2", clock.now, 300, key="k2").row()])
    gateway = Gateway("g", store, clock)
    assert gateway.let_in(need(NEURONS, 500, 101, key="k1")) is None
    assert gateway.let_in(need(NEURONS, 500, 100, key="k1")) is not None
    assert gateway.let_in(need(NEURONS, 1000, 301)) is None
    assert gateway.let_in(need(NEURONS, 1000, 300)) is not None


def test_a_budget_of_money_counts_its_own_currency(store):
    """A price list in another currency begins another sum; what is leased of the old one is no part of it."""
    clock = Clock()
    euros, dollars = f"{MONEY}:EUR", f"{MONEY}:USD"
    store.write([entry("r1", clock.now, 0, money=300, currency="EUR").row()])
    store.write([entry("r2", clock.now, 0, money=900, currency="USD").row()])
    one, two = Gateway("one", store, clock), Gateway("two", store, clock)
    assert one.let_in(need(euros, 1000, 701)) is None
    running = one.let_in(need(euros, 1000, 600))
    assert two.let_in(need(dollars, 1000, 101)) is None
    assert two.let_in(need(dollars, 1000, 100)) is not None
    assert two.let_in_with(one, need(euros, 1000, 101)) is None
    # A request is settled in the currency of the price that it was let in with.
    running.settle({MONEY: 250}, "r3")
    store.write([entry("r3", clock.now, 0, money=250, currency="EUR").row()])
    one.poll()
    clock.now += 1
    assert two.let_in_with(one, need(euros, 1000, 451)) is None
    assert two.let_in_with(one, need(euros, 1000, 450)) is not None


@pytest.mark.parametrize(("kind", "limit"), [(NEURONS, 1000), (f"{MONEY}:USD", 10**12)])
def test_a_budget_begins_anew(store, kind, limit):
    """Neurons at 00:00 UTC, money with the month; what is running then is a part of the new one."""
    clock = Clock(1_796_083_199.0)  # 2026-11-30, 23:59:59 UTC
    gateway = Gateway("g", store, clock)
    gateway.let_in(need(kind, limit, limit // 2)).settle({Quota("", "", kind).family: limit // 2}, "r1")
    whole = {"neurons": limit // 2} if kind == NEURONS else {"neurons": 0, "money": limit // 2}
    store.write([entry("r1", clock.now, **whole).row()])
    gateway.poll()
    running = gateway.let_in(need(kind, limit, limit // 2))
    assert running is not None and gateway.let_in(need(kind, limit, 1)) is None
    clock.now += 1
    gateway.poll()
    assert gateway.let_in(need(kind, limit, limit // 2 + 1)) is None
    assert gateway.let_in(need(kind, limit, limit // 2)) is not None


def test_what_a_dead_gateway_had_leased_comes_back_with_its_journal(store):
    clock = Clock()
    one, two = Gateway("one", store, clock), Gateway("two", store, clock)
    one.let_in(need(NEURONS, 1000, 200)).settle({NEURONS: 150}, "r1")
    one.journal.append(entry("r1", clock.now, 150))
    assert one.let_in(need(NEURONS, 1000, 700)) is not None
    # It dies over the second. Nothing comes back until its journal has been read.
    clock.now += 600
    assert two.let_in(need(NEURONS, 1000, 200)) is None
    one.write()
    store.leases.forget("one")
    clock.now += 1
    assert two.let_in(need(NEURONS, 1000, 851)) is None
    assert two.let_in(need(NEURONS, 1000, 850)) is not None


def test_leases_of_a_node_that_is_lost_count_until_its_entries_can_not_come_any_more(store):
    clock = Clock()
    Gateway("lost", store, clock).let_in(need(NEURONS, 1000, 900))
    clock.now += 11 * 3600
    two = Gateway("two", store, clock)
    assert two.let_in(need(NEURONS, 1000, 200)) is None
    clock.now += 3600
    assert two.let_in(need(NEURONS, 1000, 1000)) is not None
    store.leases.trim(clock.now + 50 * 86400)
    assert Gateway("three", store, clock).let_in(need(NEURONS, 1000, 1000)) is not None


def test_without_the_store_budgets_hold_what_is_leased_and_rates_go_on(store):
    clock = Clock()
    gateway, other = Gateway("g", store, clock), Gateway("h", store, clock)
    for _ in range(20):
        other.let_in(need(REQUESTS, 50)).settle({REQUESTS: 1})
    other.poll()
    needs = [need(REQUESTS, 50), need(NEURONS, 8000, 100)]
    gateway.let_in(*needs).settle({REQUESTS: 1, NEURONS: 100}, "r1")
    gateway.poll()
    for _ in range(2):
        with pytest.raises(Away):
            gateway.leases.exchange(Gone(), "g")
    # 20 of the others are known, and one of its own.
    let = 0
    while isinstance(taken := gateway.leases.take([need(REQUESTS, 50)]), Reservation):
        taken.settle({REQUESTS: 1})
        let += 1
    assert let <= 29 and isinstance(taken, Short) and not taken.away
    clock.now += 60
    while isinstance(taken := gateway.leases.take([need(REQUESTS, 50), need(NEURONS, 8000, 100)]), Reservation):
        taken.settle({REQUESTS: 1, NEURONS: 100}, f"r{clock.now}")
        clock.now += 0.01
    assert isinstance(taken, Short) and taken.away and taken.need.quota.kind == NEURONS
    held, amount = gateway.leases.held()[Quota("a", "", NEURONS)]
    assert held <= amount <= 8000
    # It is back: what was leased and is not written is still held.
    gateway.poll()
    assert isinstance(gateway.leases.take([need(NEURONS, 8000, 100)]), Reservation)
