"""The chaos run holds the ledger against what clients were told."""

from __future__ import annotations

import time

import sqlalchemy as sa

from benchmarks.chaos import ledger
from benchmarks.chaos.dialects import Seen
from benchmarks.chaos.ledger import Receipts, Told, unmatched
from benchmarks.chaos.weather import Weather
from serve_app.state.spending.ledger import Entry
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger as ledger_table
from serve_app.state.store.tables import ledger_days

USED = {"input_tokens": 3, "output_tokens": 4}


def entry(request: str, **changes: object) -> Entry:
    fields = {"status": "done", "units": USED, "neurons": 700, "at": time.time(), "seconds": 0.1, **changes}
    return Entry(request, "a", "k", model="m", task="t", money=5, currency="USD", **fields)


def wrong(store: SqlStore, *told: Seen, alone: bool = True) -> list[str]:
    receipts, weather = Receipts(), Weather()
    for one in told:
        receipts.note(Told("chat", one, (3, 4)))
    receipts.check(store, weather, alone=alone)
    return [found["what"] for found in weather.broke]


def test_the_ledger_is_held_against_what_clients_were_told(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LATE_S", 0.0)

    def told(request: str = "r1", **changes: object) -> Seen:
        return Seen(**{"usage": (3, 4), "neurons": 700, "finished": True, "request": request, **changes})

    with SqlStore(tmp_path) as store:
        store.open()
        store.write([entry("r1").row()])
        assert wrong(store, told()) == []
        assert "no entry" in wrong(store, told(), told("r2"))[0]
        assert "told (3, 5) tokens" in wrong(store, told(usage=(3, 5)))[0]
        assert "701 micro-neurons" in wrong(store, told(neurons=701))[0]
        assert "was refused" in wrong(store, told(refused=True, finished=False))[0]
        assert "nobody has asked for" in wrong(store)[0] and wrong(store, alone=False) == []
        # Its connection broke before its id was known: it may be the one that has the entry.
        assert wrong(store, told("", finished=False)) == []
        # Of another prompt it cannot be, and one request cannot have made two.
        store.write([entry("r9", units={"input_tokens": 4, "output_tokens": 4}).row()])
        assert "nobody has asked for" in wrong(store, told(), told("", finished=False))[0]
        with store.database.writing() as connection:
            connection.execute(sa.delete(ledger_table).where(ledger_table.c.id == "r9"))
            connection.execute(sa.update(ledger_days).values(neurons=700, entries=1, money=5, **USED))
        # A library that has sent it again and again has not seen the id that has the entry.
        assert wrong(store, told("r8", finished=False, key="k")) == []
        assert "no entry" in wrong(store, told("r8", key="k"))[0]
        # Cut off by its client or a fault: never more than there is.
        assert wrong(store, told(finished=False)) == []
        store.write([entry("r1.1").row(), entry("r2", status="left").row()])
        assert "charged for [6, 8]" in wrong(store, told(finished=False), told("r2", finished=False))[0]
        assert wrong(store, told(usage=(6, 8), neurons=1400), told("r2", finished=False)) == []
        assert "says {'left'}" in wrong(store, told(usage=(6, 8), neurons=1400), told("r2"))[0]
        with store.database.writing() as connection:
            connection.execute(sa.update(ledger_days).values(neurons=1))
        assert (
            "the day's sum of neurons" in wrong(store, told(usage=(6, 8), neurons=1400), told("r2", finished=False))[0]
        )


def test_as_many_entries_as_possible_have_a_request():
    """Whoever comes first takes none that another needs."""
    now = time.time()

    def told(model: str = "", began: float = 0.0, keep_s: float = 0.0) -> Told:
        return Told("ask", Seen(), None, model, keep_s, now + began)

    one, other = [[entry(name, at=now, seconds=0.0)] for name in ("one", "other")]
    late = [entry("late", at=now + 50.0, seconds=0.0)]
    # The late one fits one of the two requests alone.
    assert unmatched([one, late], [told(), told(began=-55.0)]) == []
    assert unmatched([one, late], [told(began=-55.0), told()]) == []
    assert unmatched([one, other, late], [told(), told(began=-55.0)]) in ([other], [late])
    assert unmatched([one], [told("another model")]) == [one] and unmatched([one], [told("m")]) == []
    # What goes on without its client may be begun with again by another gateway.
    late = [entry("late", at=now + 200.0, seconds=0.0)]
    assert unmatched([late], [told()]) == [late] and unmatched([late], [told(keep_s=300.0)]) == []
