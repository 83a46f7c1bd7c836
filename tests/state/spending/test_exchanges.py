"""What an exchange of many leases asks of the store, and which leases are in it."""

from __future__ import annotations

import random

import sqlalchemy as sa

from serve_app.state.spending.leases import Leases, Reservation
from serve_app.state.spending.quotas import MONEY, NEURONS, REQUESTS, Quota, Want
from serve_app.state.store.spending import spent
from tests.state.spending.test_leases import NOON, Clock, entry, need


def test_many_budgets_are_asked_for_together_as_one_by_one(store, monkeypatch):
    """A gateway asks four times a second for all that have been used lately, and others wait for that."""
    monkeypatch.setattr(spent, "_BUDGETS", 7)
    dice, day = random.Random(7), 86_400
    rows = [
        entry(f"e{n}", NOON - dice.randrange(40) * day, dice.randrange(9), f"a{dice.randrange(15)}",
              f"k{dice.randrange(3)}", dice.randrange(9), dice.choice(["USD", "EUR"]))
        for n in range(500)
    ]  # fmt: skip
    store.write([row.row() for row in rows])
    begins = {
        Quota(f"a{account}", key, kind): int(NOON) // day * day
        - (0 if kind == NEURONS else dice.choice([19, 20]) * day)
        for account in range(18)
        for key in ("", "k1", "never used")
        for kind in (NEURONS, MONEY, f"{MONEY}:EUR")
    }
    statements = []
    sa.event.listen(store.database.engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
    with store.database.reading() as connection:
        found = spent.since_each(connection, begins)
        assert len(statements) < 40
        assert found == {quota: spent.since(connection, quota, begin) for quota, begin in begins.items()}
    assert len(begins) == 162 and sum(map(bool, found.values())) > 60
    store.leases.lease("g", NOON, [Want(quota, begin, 10**6, 0, 10, 0) for quota, begin in begins.items()])


def test_leases_that_nobody_uses_are_left_alone_for_a_while(store):
    clock, told = Clock(), []

    class Watched:
        away_s = 0.0

        def lease(self, owner, now, wants):
            told.append({want.quota.account for want in wants})
            return store.leases.lease(owner, now, wants)

    one = Leases(clock=clock)
    for account in ("idle", "used", "budget", "short"):
        kind = NEURONS if account == "budget" else REQUESTS
        needs = [need(kind, 10, account=account)]
        with one.waiting(needs):
            one.exchange(Watched(), "g1")
        taken = one.take(needs)
        assert isinstance(taken, Reservation)
        taken.settle({NEURONS: 1}, "entry" if account == "budget" else "")
    other, short = Leases(clock=clock), [need(REQUESTS, 10, 10, account="short")]
    with other.waiting(short):
        other.exchange(store.leases, "g2")
    one.exchange(Watched(), "g1", all=False, poll=True)
    told.clear()
    clock.now += 0.25
    used = one.take([need(REQUESTS, 10, account="used")])
    assert isinstance(used, Reservation)
    used.settle({REQUESTS: 1})
    one.exchange(Watched(), "g1", all=False, poll=True)
    # What another is short of, and whose entries are on their way to the ledger, is told each time.
    assert told == [{"used", "budget", "short"}]
    clock.now += 0.25
    one.exchange(Watched(), "g1", all=False)
    assert told == [{"used", "budget", "short"}], "nothing was due"
    clock.now += 0.1
    one.exchange(Watched(), "g1", all=False, poll=True)
    assert told[-1] == {"idle", "budget", "short"}
