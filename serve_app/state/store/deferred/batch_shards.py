"""Shards of batches in the store: who works on which, and what came of their requests.

Transactions lock rows in one order, so that two never wait for each other: shards before batches, each by their keys.
Claims wait for nobody's shards.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch, Claim, Counts, Held, Result, Shard, ShardResults, Used, Waiting
from serve_app.state.store.database import Database
from serve_app.state.store.deferred.batch_tables import batch_results, batch_shards, batches
from serve_app.state.store.spending.ledger import LedgerTable
from serve_app.state.store.tables import AHEAD_S

_JSON = msgspec.json.Encoder()
_CALLER = msgspec.json.Decoder(Caller)
_USED = msgspec.json.Decoder(Used)
_COUNTS = tuple(Counts.__dataclass_fields__)
_SUMS = tuple(name for name in Used.__dataclass_fields__ if name != "currency")
_PLAIN = tuple(
    name for name in Batch.__dataclass_fields__ if name not in ("caller", "counts", "used") and name in batches.c
)
_GROUP = 500
RUNNABLE = ("queued", "running")
# Named once: of a shard's row, whether somebody works on it or has.
_CLAIMED = batch_shards.c.owner > ""


def columns_of(batch: Batch) -> dict[str, Any]:
    """Of a new batch; nobody's."""
    found = {name: getattr(batch, name) for name in _PLAIN}
    found |= {name: getattr(batch.counts, name) for name in _COUNTS}
    found |= {name: getattr(batch.used, name) for name in (*_SUMS, "currency")}
    caller = {"caller": _JSON.encode(batch.caller).decode(), "account": batch.caller.account}
    return {**found, **caller, "owner": "", "until": 0.0, "open": 0}


def batch_of(row: Any) -> Batch:
    """From all columns of its row."""
    return Batch(
        **{name: getattr(row, name) for name in _PLAIN},
        caller=_CALLER.decode(row.caller),
        counts=Counts(*(getattr(row, name) for name in _COUNTS)),
        used=Used(**{name: getattr(row, name) for name in (*_SUMS, "currency")}),
    )


class BatchShards:
    """The part of :class:`serve_app.state.deferred.batches.BatchStore` that runs shards."""

    def __init__(self, database: Database, ledger: LedgerTable) -> None:
        self._database = database
        self._ledger = ledger

    def claim(
        self,
        owner: str,
        now: float,
        until: float,
        models: Collection[str],
        limit: int,
        *,
        requests: int = sys.maxsize,
        resting: Collection[tuple[str, str]] = (),
    ) -> list[Claim]:
        wanted = batch_shards.c.model.in_(models) & _runnable(now)
        if resting:
            wanted &= sa.tuple_(batch_shards.c.account, batch_shards.c.model).not_in(list(resting))
        free = (batch_shards.c.owner == "") | (_CLAIMED & lapsed(batch_shards, now))
        there = sa.select(batch_shards.c.batch).where(free, wanted)
        with self._database.reading() as connection:
            # Nobody waits for a runner that finds nothing.
            if connection.execute(there.join_from(batch_shards, batches).limit(1)).first() is None:
                return []
        with self._database.writing() as connection:
            for key in lock(connection, _CLAIMED & lapsed(batch_shards, now), skip=True):
                connection.execute(sa.update(batch_shards).where(_is(*key)).values(owner=""))
            chosen = list(self._in_turn(connection, wanted, limit, requests))
            if not chosen:
                return []
            ids = sorted({row.batch for row in chosen})
            for row in chosen:
                taking = sa.update(batch_shards).where(_is(row.batch, row.number))
                connection.execute(taking.values(owner=owner, epoch=batch_shards.c.epoch + 1, until=until))
            running = {"status": "running", "started": sa.func.coalesce(batches.c.started, now)}
            for batch_id in ids:
                begun = sa.update(batches).where(batches.c.id == batch_id, batches.c.status == "queued")
                connection.execute(begun.values(**running))
            rows = connection.execute(sa.select(batches).where(batches.c.id.in_(ids)))
            known = {row.id: batch_of(row) for row in rows}
        return [Claim(known[row.batch], shard_of(row), row.epoch + 1, row.done) for row in chosen]

    def _in_turn(
        self, connection: Connection, wanted: sa.ColumnElement[bool], limit: int, requests: int
    ) -> Iterator[sa.Row[tuple[Any, ...]]]:
        """Free shards, locked: one of the account that has the fewest claims, and so on."""
        counted = sa.select(batch_shards.c.account, sa.func.count()).where(_CLAIMED).group_by(batch_shards.c.account)
        held: dict[str, int] = {account: count for account, count in connection.execute(counted)}
        accounts = sa.select(batch_shards.c.account).where(batch_shards.c.owner == "").distinct()
        turns = [(held.get(account, 0), account) for account in connection.execute(accounts).scalars()]
        heapq.heapify(turns)
        free = sa.select(batch_shards).join(batches).where(batch_shards.c.owner == "", wanted).limit(limit)
        free = free.order_by(batch_shards.c.deadline, batch_shards.c.batch, batch_shards.c.number)
        free = free.with_for_update(of=batch_shards, skip_locked=True)
        found: dict[str, Iterator[sa.Row[tuple[Any, ...]]]] = {}
        while turns and limit and requests > 0:
            count, account = heapq.heappop(turns)
            if account not in found:
                found[account] = iter(connection.execute(free.where(batch_shards.c.account == account)).all())
            if (row := next(found[account], None)) is not None:
                heapq.heappush(turns, (count + 1, account))
                limit -= 1
                requests -= row.requests - row.done
                yield row

    def done(self, batch_id: str, numbers: Collection[int]) -> frozenset[int]:
        asked, found = list(numbers), set[int]()
        known = sa.select(batch_results.c.number).where(batch_results.c.batch == batch_id)
        with self._database.reading() as connection:
            for start in range(0, len(asked), _GROUP):
                some = known.where(batch_results.c.number.in_(asked[start : start + _GROUP]))
                found.update(connection.execute(some).scalars())
        return frozenset(found)

    def renew(self, owner: str, now: float, until: float) -> list[Held]:
        mine = batch_shards.c.owner == owner
        columns = (batch_shards.c.batch, batch_shards.c.number, batch_shards.c.epoch)
        query = sa.select(*columns, batches.c.status, batches.c.deadline).join_from(batch_shards, batches).where(mine)
        own = (batches.c.expires.is_(None)) & (batches.c.owner == owner)
        with self._database.writing() as connection:
            lock(connection, mine)
            connection.execute(sa.update(batch_shards).where(mine).values(until=until))
            connection.execute(sa.update(batches).where(own).values(until=until))
            return [
                Held(row.batch, row.number, row.epoch, row.status not in RUNNABLE or row.deadline <= now)
                for row in connection.execute(query)
            ]

    def write(self, owner: str, parts: Sequence[ShardResults]) -> set[tuple[str, int]]:
        refused: set[tuple[str, int]] = set()
        entries: list[dict[str, Any]] = []
        sums: dict[str, Counter[str]] = {}
        with self._database.writing() as connection:
            for part in sorted(parts, key=lambda part: (part.batch, part.shard)):
                own = _is(part.batch, part.shard) & _held(owner, part.epoch)
                # Locks its row, so that nobody takes the shard over in between.
                if not connection.execute(sa.update(batch_shards).where(own).values(owner=owner)).rowcount:
                    refused.add((part.batch, part.shard))
                    continue
                fresh = self.put(connection, part.batch, part.results)
                more = {"done": batch_shards.c.done + len(fresh)}
                connection.execute(sa.update(batch_shards).where(own).values(**more))
                sums.setdefault(part.batch, Counter()).update(sums_of(fresh))
                entries += [row.columns for row in part.entries]
            currencies = {part.batch: one.used.currency for part in parts for one in part.results if one.used.currency}
            for batch_id, counted in sorted(sums.items()):
                self.count(connection, batch_id, counted, currencies.get(batch_id, ""))
            if entries:
                self._ledger.write(connection, entries)
        return refused

    def put(self, connection: Connection, batch_id: str, results: Sequence[Result]) -> list[Result]:
        """Those that were not there."""
        if not results:
            return []
        rows = [
            {
                "batch": batch_id,
                "number": one.number,
                "id": one.id,
                "outcome": one.outcome,
                "status": one.status,
                "body": one.body,
                "request_id": one.request_id,
                "used": _JSON.encode(one.used).decode(),
            }
            for one in results
        ]
        put = self._database.insert(batch_results).on_conflict_do_nothing().returning(batch_results.c.number)
        fresh = set(connection.execute(put, rows).scalars())
        return [one for one in {one.number: one for one in reversed(results)}.values() if one.number in fresh]

    def count(self, connection: Connection, batch_id: str, counted: Counter[str], currency: str = "") -> None:
        """Adds to the sums of a batch."""
        values: dict[str, Any] = {name: batches.c[name] + count for name, count in counted.items() if count}
        if currency:
            values["currency"] = currency
        if values:
            connection.execute(sa.update(batches).where(batches.c.id == batch_id).values(**values))

    def finish(self, owner: str, batch_id: str, shard: int, epoch: int, now: float) -> bool:
        own = _is(batch_id, shard) & _held(owner, epoch)
        query = sa.select(batches.c.status, batches.c.deadline).where(batches.c.id == batch_id)
        with self._database.writing() as connection:
            locked = sa.update(batch_shards).where(own).values(owner=owner)
            row = connection.execute(locked.returning(batch_shards.c.requests, batch_shards.c.done)).one_or_none()
            if row is None:
                return False
            batch = connection.execute(query).one()
            left = row.requests - row.done
            if left and batch.status in RUNNABLE and now < batch.deadline:
                return False
            connection.execute(sa.update(batch_shards).where(own).values(owner=None))
            rest = "expired" if batch.status in RUNNABLE else "cancelled"
            counted = Counter({rest: left, "open": -1})
            self.count(connection, batch_id, counted)
            over = (batches.c.id == batch_id) & (batches.c.open == 0)
            ending = sa.update(batches).where(over, batches.c.status.in_((*RUNNABLE, "cancelling")))
            connection.execute(ending.values(status="finalizing", finalizing=now))
        return True

    def give_back(self, owner: str, batch_id: str, shard: int, epoch: int) -> None:
        own = _is(batch_id, shard) & _held(owner, epoch)
        with self._database.writing() as connection:
            connection.execute(sa.update(batch_shards).where(own).values(owner=""))

    def release(self, owner: str) -> None:
        own = (batches.c.expires.is_(None)) & (batches.c.owner == owner)
        with self._database.writing() as connection:
            lock(connection, batch_shards.c.owner == owner)
            connection.execute(sa.update(batch_shards).where(batch_shards.c.owner == owner).values(owner=""))
            connection.execute(sa.update(batches).where(own).values(owner="", until=0.0))

    def waiting(self) -> dict[str, Waiting]:
        left = sa.func.sum(batch_shards.c.requests - batch_shards.c.done)
        query = sa.select(batch_shards.c.model, left, sa.func.min(batch_shards.c.deadline))
        query = query.join_from(batch_shards, batches).where(batch_shards.c.owner >= "", batches.c.status.in_(RUNNABLE))
        unchecked = sa.select(sa.func.count(), sa.func.min(batches.c.deadline)).where(batches.c.status == "validating")
        with self._database.reading() as connection:
            rows = connection.execute(query.group_by(batch_shards.c.model))
            found = {model: Waiting(int(requests), deadline) for model, requests, deadline in rows}
            count, deadline = connection.execute(unchecked).one()
        return found | ({"": Waiting(count, deadline)} if count else {})

    def shards(self, batch_id: str) -> list[Shard]:
        query = sa.select(batch_shards).where(batch_shards.c.batch == batch_id).order_by(batch_shards.c.number)
        with self._database.reading() as connection:
            return [shard_of(row) for row in connection.execute(query)]

    def results(self, batch_id: str, after: int = -1, limit: int = 1000) -> list[Result]:
        query = sa.select(batch_results).where(batch_results.c.batch == batch_id, batch_results.c.number > after)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(batch_results.c.number).limit(limit))
            return [
                Result(r.number, r.id, r.outcome, r.status, r.body, r.request_id, _USED.decode(r.used)) for r in rows
            ]


def lapsed(table: sa.Table, now: float) -> sa.ColumnElement[bool]:
    """Claims that nobody renews any more. One that ends too far ahead was made before the clock was put back."""
    return (table.c.until <= now) | (table.c.until > now + AHEAD_S)


def shard_of(row: Any) -> Shard:
    return Shard(row.number, row.model, row.blob, row.requests)


def lock(connection: Connection, which: sa.ColumnElement[bool], *, skip: bool = False) -> list[tuple[str, int]]:
    """Locks rows of shards in one order, but for those that others have where these are to be skipped."""
    query = sa.select(batch_shards.c.batch, batch_shards.c.number).where(which)
    query = query.order_by(batch_shards.c.batch, batch_shards.c.number).with_for_update(skip_locked=skip)
    return [(row.batch, row.number) for row in connection.execute(query)]


def _is(batch_id: str, shard: int) -> sa.ColumnElement[bool]:
    return (batch_shards.c.batch == batch_id) & (batch_shards.c.number == shard)


def _held(owner: str, epoch: int) -> sa.ColumnElement[bool]:
    return (batch_shards.c.owner == owner) & (batch_shards.c.epoch == epoch)


def _runnable(now: float) -> sa.ColumnElement[bool]:
    return batches.c.status.in_(RUNNABLE) & (batch_shards.c.deadline > now)


def sums_of(results: Sequence[Result]) -> Counter[str]:
    found: Counter[str] = Counter(one.outcome for one in results)
    for one in results:
        found.update({name: getattr(one.used, name) for name in _SUMS})
    return found
