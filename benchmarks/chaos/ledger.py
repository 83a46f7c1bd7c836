"""The ledger against what clients were told, entry by entry: nothing twice, nothing missing, nothing beyond."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

from benchmarks.chaos.batches import Batches
from benchmarks.chaos.dialects import Seen
from benchmarks.chaos.weather import Weather
from serve_app.state.spending.ledger import DAY_S, Entry
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger, ledger_days

# A killed gateway's journal is looked for every five seconds; then what it holds has to be written.
LATE_S = 20.0
# Until a request whose connection broke has been begun with; a library sends it again for some time.
NAMELESS_S = 60.0
ABOUT_S = 5.0  # that a request takes, for the faults that it has met
SHOWN = 3  # of the requests that an unknown entry was compared with


@dataclass(slots=True, frozen=True)
class Told:
    """One request: what its client saw of it. ``most``: tokens of the whole answer, in and out. ``model``: that it was
    for, "" if that is not known. ``keep_s``: how long it goes on without a client, and may be begun with again by
    another gateway. ``began``: unix seconds.
    """

    ask: str
    seen: Seen
    most: tuple[int, int] | None
    model: str = ""
    keep_s: float = 0.0
    began: float = field(default_factory=time.time)

    @property
    def nameless(self) -> bool:
        """Whether entries of ids that its client has never seen may be its: its connection broke before the first byte,
        or a library has sent it again and again without an end.
        """
        return not self.seen.request or bool(self.seen.key and not self.seen.finished)

    def made(self, entries: list[Entry]) -> bool:
        """Whether such entries may be this request's."""
        begun = _begun(entries)
        if not self.began - 1.0 <= begun <= self.began + NAMELESS_S + self.keep_s:
            return False
        if self.model and any(entry.model != self.model for entry in entries):
            return False
        if self.most is None:
            return True
        # Of several prompts some may have been answered.
        return all(count <= most for count, most in zip(_used(entries), self.most, strict=True))


class Receipts:
    """Every request of a run, until :meth:`check`."""

    def __init__(self) -> None:
        self._told: list[Told] = []

    def note(self, told: Told) -> None:
        self._told.append(told)

    def check(self, store: SqlStore, weather: Weather, batches: Batches | None = None, *, alone: bool) -> int:
        """Compares all of them, and ``batches``, with the ledger; how many entries there are. ``alone``: nobody else
        asked anything of this store. Blocks until everything agrees, or for :data:`LATE_S` seconds.
        """
        until = time.monotonic() + LATE_S
        while True:
            entries = _entries(store)
            problems = list(self._problems(entries, alone))
            if not problems or time.monotonic() > until:
                break
            time.sleep(0.5)
        for told, problem in problems:
            at = told.began - time.time() + time.monotonic()
            during = [window.fault for window in weather.during(at, at + ABOUT_S)]
            how = {"asked_at": round(at - weather.started, 1), "during": during, "keep_s": told.keep_s}
            how["key"] = bool(told.seen.key)
            weather.violation(f"ledger: {problem}", ask=told.ask, request=told.seen.request, **how)
        if batches is not None:
            batches.check(entries, alone=alone)
        if problem := sums_problem(store):
            weather.violation(f"ledger: {problem}")
        return len(entries)

    def _problems(self, entries: list[Entry], alone: bool) -> Iterator[tuple[Told, str]]:
        found: dict[str, list[Entry]] = {}
        for entry in entries:
            if not entry.batch:
                found.setdefault(entry.id.partition(".")[0], []).append(entry)
        for told in self._told:
            if told.seen.request and (problem := _problem(told, found.pop(told.seen.request, []))):
                yield told, problem
        # Each of the entries whose id nobody knows belongs to a request of its own.
        nameless = [told for told in self._told if told.nameless]
        for made in unmatched(list(found.values()), nameless) if alone else ():
            found_at = _begun(made)
            near = sorted(nameless, key=lambda told: abs(found_at - told.began))[:SHOWN]
            others = ", ".join(
                f"{told.ask} {found_at - told.began:+.1f} s before it, at most {told.most}" for told in near
            )
            problem = f"nobody has asked for {made[0]}; of {len(nameless)} requests without an id the nearest: {others}"
            yield Told("any", Seen(request=made[0].id), None), problem


def unmatched(entries: list[list[Entry]], nameless: list[Told]) -> list[list[Entry]]:
    """Entries, by request, that are left over when as many as possible have a request of their own."""
    fits = [[n for n, told in enumerate(nameless) if told.made(made)] for made in entries]
    has: dict[int, int] = {}

    def place(number: int, tried: set[int]) -> bool:
        """Whether it gets a request, from another one that then takes another."""
        for n in fits[number]:
            if n not in tried:
                tried.add(n)
                if n not in has or place(has[n], tried):
                    has[n] = number
                    return True
        return False

    return [made for number, made in enumerate(entries) if not place(number, set())]


def _begun(entries: list[Entry]) -> float:
    return min(entry.at - entry.seconds for entry in entries)


def _problem(told: Told, entries: list[Entry]) -> str | None:
    """What is wrong with the entries of one request."""
    seen = told.seen
    used = _used(entries)
    if seen.refused:
        return f"{len(entries)} entries for a request that was refused" if entries else None
    if seen.finished and seen.error is None:
        if not entries:
            return "no entry for a complete answer"
        if states := {entry.status for entry in entries} - {"done"}:
            return f"the entry of a complete answer says {states}"
        if seen.usage is not None and used != [*seen.usage]:
            return f"the client was told {seen.usage} tokens and is charged for {used}"
        neurons = sum(entry.neurons for entry in entries)
        if seen.neurons is not None and neurons != seen.neurons:
            return f"the client was told {seen.neurons} micro-neurons and is charged for {neurons}"
    elif told.most is not None and any(count > most for count, most in zip(used, told.most, strict=True)):
        return f"a broken answer is charged for {used} tokens, and the whole one has {told.most}"
    return None


def _used(entries: list[Entry]) -> list[int]:
    """Tokens, in and out."""
    return [sum(entry.units.get(name, 0) for entry in entries) for name in ("input_tokens", "output_tokens")]


def _entries(store: SqlStore) -> list[Entry]:
    with store.database.reading() as connection:
        return [Entry.of(dict(row)) for row in connection.execute(sa.select(ledger)).mappings()]


def sums_problem(store: SqlStore) -> str | None:
    """Sums that are not those of the entries, of days whose entries are all there."""
    names: tuple[str, ...] = ("entries", "neurons", "money", "input_tokens", "cached_tokens", "output_tokens")
    by_hand: dict[int, Counter[str]] = {}
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(ledger)).mappings().all()
        days = connection.execute(sa.select(ledger_days)).mappings().all()
    for entry in (Entry.of(dict(row)) for row in rows):
        counts = {**entry.units, "entries": 1, "neurons": entry.neurons, "money": entry.money}
        by_hand.setdefault(int(entry.at // DAY_S), Counter()).update(counts)
    for day, total in by_hand.items():
        for name in names:
            summed = sum(row[name] for row in days if row["day"] == day)
            if summed != total[name]:
                return f"the day's sum of {name} is {summed} and its entries have {total[name]}"
    return None
