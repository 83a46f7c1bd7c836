"""Batches in the store: accepted, checked, ended, forgotten. Their shards are in :mod:`.batch_shards`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.deferred.batches import Batch, Result, Shard
from serve_app.state.errors import QueueFull
from serve_app.state.store.database import Database
from serve_app.state.store.deferred.batch_shards import (
    RUNNABLE,
    BatchShards,
    batch_of,
    columns_of,
    lapsed,
    lock,
    sums_of,
)
from serve_app.state.store.deferred.batch_tables import batch_results, batch_shards, batches
from serve_app.state.store.deferred.events import EventTable
from serve_app.state.store.spending.ledger import LedgerTable

# Results that one transaction writes or drops at most, so that none holds others up for long.
_GROUP = 5000
_LEFT = batches.c.total - batches.c.succeeded - batches.c.failed - batches.c.cancelled - batches.c.expired
# Everything that belongs to it has been put away: it waits for being forgotten.
_CLEARED = batches.c.expires.is_not(None)


class BatchTables(BatchShards):
    """:class:`serve_app.state.deferred.batches.BatchStore`."""

    def __init__(
        self, database: Database, ledger: LedgerTable, events: EventTable, *, max_left: int = 2_000_000
    ) -> None:
        super().__init__(database, ledger)
        self._events = events
        self.max_left = max_left

    def create(self, batch: Batch, owner: str = "", until: float = 0.0) -> None:
        columns = {**columns_of(batch), "owner": owner, "until": until}
        put = self._database.insert(batches).values(**columns).on_conflict_do_nothing()
        with self._database.writing(durable=True) as connection:
            left = _left(connection, batch.caller.account)
            # What is larger than the bound is taken where nothing else waits.
            if left and left + batch.counts.total > self.max_left:
                raise QueueFull(
                    f"This account has {left:,} requests of batches in the queue; the most are {self.max_left:,}."
                )
            if connection.execute(put.returning(batches.c.id)).first() is None:
                raise ValueError(f"there is a batch {batch.id} already")

    def find(self, account: str, batch_id: str) -> Batch | None:
        with self._database.reading() as connection:
            row = connection.execute(sa.select(batches).where(_own(account, batch_id))).one_or_none()
        return None if row is None else batch_of(row)

    def known(self, ids: Collection[str]) -> set[str]:
        with self._database.reading() as connection:
            return set(connection.execute(sa.select(batches.c.id).where(batches.c.id.in_(ids))).scalars())

    def page(
        self, account: str, doors: Collection[str] = (), *, after: str = "", before: str = "", limit: int = 20
    ) -> list[Batch]:
        place = sa.tuple_(batches.c.created, batches.c.id)
        query = sa.select(batches).where(batches.c.account == account).limit(limit)
        if doors:
            query = query.where(batches.c.door.in_(doors))
        with self._database.reading() as connection:
            if cursor := after or before:
                at = sa.select(batches.c.created, batches.c.id).where(_own(account, cursor))
                known = connection.execute(at).one_or_none()
                if known is None:
                    return []
                there = sa.tuple_(*known)
                query = query.where(place < there if after else place > there)
            if before and not after:
                rows = connection.execute(query.order_by(batches.c.created, batches.c.id)).all()[::-1]
            else:
                rows = connection.execute(query.order_by(batches.c.created.desc(), batches.c.id.desc())).all()
        return [batch_of(row) for row in rows]

    def left(self, account: str) -> int:
        with self._database.reading() as connection:
            return _left(connection, account)

    def busy(self) -> bool:
        with self._database.reading() as connection:
            return connection.execute(sa.select(batches.c.id).where(~_CLEARED).limit(1)).first() is not None

    def claim_input(self, owner: str, now: float, until: float) -> Batch | None:
        free = (batches.c.status == "validating") & (batches.c.deadline > now) & lapsed(batches, now)
        return self._take(free, owner, until)

    def planned(self, owner: str, batch_id: str, shards: Sequence[Shard], wrong: Sequence[Result], now: float) -> bool:
        own = (batches.c.id == batch_id) & (batches.c.owner == owner) & (batches.c.status == "validating")
        total = sum(shard.requests for shard in shards) + len(wrong)
        cut: dict[str, Any] = {"status": "queued", "total": total, "open": len(shards), "owner": "", "until": 0.0}
        if not shards:
            cut |= {"status": "finalizing", "finalizing": now}
        with self._database.writing(durable=True) as connection:
            row = connection.execute(sa.update(batches).where(own).values(**cut).returning(batches)).one_or_none()
            if row is None:
                return False
            rest = iter(wrong)
            while some := list(islice(rest, _GROUP)):
                fresh = self.put(connection, batch_id, some)
                self.count(connection, batch_id, sums_of(fresh))
            rows = [
                {
                    "batch": batch_id,
                    "number": shard.number,
                    "account": row.account,
                    "deadline": row.deadline,
                    "model": shard.model,
                    "blob": shard.blob,
                    "requests": shard.requests,
                    "done": 0,
                    "owner": "",
                    "epoch": 0,
                    "until": 0.0,
                }
                for shard in shards
            ]
            if rows:
                connection.execute(sa.insert(batch_shards), rows)
            self._events.batch(connection, batch_of(row), now)
        return True

    def refused(self, owner: str, batch_id: str, problems: bytes, now: float) -> bool:
        own = (batches.c.id == batch_id) & (batches.c.owner == owner) & (batches.c.status == "validating")
        failed = {
            "status": "failed",
            "problems": problems,
            "ended": now,
            "expires": now + batches.c.keep_s,
            "owner": "",
        }
        with self._database.writing() as connection:
            # No request of it is waiting any more.
            failing = sa.update(batches).where(own).values(**failed, total=0).returning(batches)
            row = connection.execute(failing).one_or_none()
            if row is not None:
                self._events.batch(connection, batch_of(row), now)
        return row is not None

    def claim_end(self, owner: str, now: float, until: float) -> Batch | None:
        over = (batches.c.status == "cancelling") | (
            batches.c.status.in_(("validating", *RUNNABLE)) & (batches.c.deadline <= now)
        )
        under_way = (batch_shards.c.owner > "") & ~lapsed(batch_shards, now)
        idle = ~sa.exists().where(batch_shards.c.batch == batches.c.id, under_way)
        ready = (batches.c.status == "finalizing") & lapsed(batches, now)
        found = sa.select(batches.c.id).where(over, idle).limit(50)
        with self._database.reading() as connection:
            closing = list(connection.execute(found).scalars())
        if closing:
            with self._database.writing() as connection:
                for batch_id in closing:
                    _close(connection, batch_id, over, now)
        return self._take(ready, owner, until)

    def _take(self, free: sa.ColumnElement[bool], owner: str, until: float) -> Batch | None:
        """One of these batches, for the owner alone."""
        first = sa.select(batches.c.id).where(free).order_by(batches.c.deadline, batches.c.id).limit(1)
        with self._database.reading() as connection:
            if connection.execute(first).first() is None:
                return None
        with self._database.writing() as connection:
            found = connection.execute(first.with_for_update(skip_locked=True)).scalar_one_or_none()
            taking = sa.update(batches).where(batches.c.id == found).values(owner=owner, until=until)
            row = connection.execute(taking.returning(batches)).one_or_none()
        return None if row is None else batch_of(row)

    def fill(self, owner: str, batch_id: str, rest: Sequence[Result]) -> bool:
        own = (batches.c.id == batch_id) & (batches.c.owner == owner) & (batches.c.status == "finalizing")
        with self._database.writing() as connection:
            if not connection.execute(sa.update(batches).where(own).values(owner=owner)).rowcount:
                return False
            self.put(connection, batch_id, rest)
        return True

    def end(self, owner: str, batch_id: str, output: str, errors: str, now: float) -> Batch | None:
        own = (batches.c.id == batch_id) & (batches.c.owner == owner) & (batches.c.status == "finalizing")
        status = sa.case(
            (batches.c.cancelling.is_not(None), "cancelled"), (batches.c.expired > 0, "expired"), else_="completed"
        )
        ended = {"status": status, "output": output, "errors": errors, "ended": now, "owner": "", "until": 0.0}
        with self._database.writing(durable=True) as connection:
            row = connection.execute(sa.update(batches).where(own).values(**ended).returning(batches)).one_or_none()
            if row is not None:
                self._events.batch(connection, batch_of(row), now)
        return None if row is None else batch_of(row)

    def uncleared(self, limit: int = 100) -> list[str]:
        query = sa.select(batches.c.id).where(~_CLEARED, batches.c.ended.is_not(None)).limit(limit)
        with self._database.reading() as connection:
            return list(connection.execute(query).scalars())

    def clear(self, batch_id: str) -> None:
        left = True
        known = sa.select(batches.c.id).where(batches.c.id == batch_id).with_for_update()
        while left:
            some = sa.select(batch_results.c.number).where(batch_results.c.batch == batch_id).limit(_GROUP)
            gone = sa.delete(batch_results).where(batch_results.c.batch == batch_id, batch_results.c.number.in_(some))
            with self._database.writing() as connection:
                # One at a time clears it.
                connection.execute(known)
                left = bool(connection.execute(gone).rowcount)
        cleared = sa.update(batches).where(batches.c.id == batch_id, batches.c.ended.is_not(None))
        with self._database.writing() as connection:
            connection.execute(known)
            connection.execute(sa.delete(batch_shards).where(batch_shards.c.batch == batch_id))
            connection.execute(cleared.values(expires=batches.c.ended + batches.c.keep_s))

    def cancel(self, account: str, batch_id: str, now: float) -> Batch | None:
        begun = _own(account, batch_id) & batches.c.status.in_(("validating", *RUNNABLE))
        with self._database.writing() as connection:
            connection.execute(sa.update(batches).where(begun).values(status="cancelling", cancelling=now))
            row = connection.execute(sa.select(batches).where(_own(account, batch_id))).one_or_none()
        return None if row is None else batch_of(row)

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """The account ends: its batches are cancelled, and forgotten as soon as they have ended."""
        own = batches.c.account == account
        begun = own & batches.c.status.in_(("validating", *RUNNABLE))
        connection.execute(sa.update(batches).where(own).values(keep_s=0.0))
        connection.execute(sa.update(batches).where(begun).values(status="cancelling", cancelling=now))
        connection.execute(sa.update(batches).where(own, _CLEARED).values(expires=now))

    def old(self, now: float, limit: int = 100) -> list[Batch]:
        query = sa.select(batches).where(batches.c.expires <= now).order_by(batches.c.expires).limit(limit)
        with self._database.reading() as connection:
            return [batch_of(row) for row in connection.execute(query)]

    def delete(self, account: str, batch_id: str) -> Batch | None:
        gone = sa.delete(batches).where(_own(account, batch_id), _CLEARED)
        with self._database.writing() as connection:
            row = connection.execute(gone.returning(batches)).one_or_none()
        return None if row is None else batch_of(row)


def _own(account: str, batch_id: str) -> sa.ColumnElement[bool]:
    return (batches.c.id == batch_id) & (batches.c.account == account)


def _close(connection: Connection, batch_id: str, over: sa.ColumnElement[bool], now: float) -> None:
    """What has no result is cancelled or expired."""
    rest = (batch_shards.c.batch == batch_id) & batch_shards.c.owner.is_not(None)
    lock(connection, rest)
    connection.execute(sa.update(batch_shards).where(rest).values(owner=None))
    cancelled = batches.c.cancelling.is_not(None)
    closed: dict[str, Any] = {"status": "finalizing", "finalizing": now, "open": 0, "owner": "", "until": 0.0}
    closed["cancelled"] = batches.c.cancelled + sa.case((cancelled, _LEFT), else_=0)
    closed["expired"] = batches.c.expired + sa.case((cancelled, 0), else_=_LEFT)
    connection.execute(sa.update(batches).where(batches.c.id == batch_id, over).values(**closed))


def _left(connection: Connection, account: str) -> int:
    query = sa.select(sa.func.sum(_LEFT)).where(batches.c.account == account, ~_CLEARED)
    return int(connection.execute(query).scalar() or 0)
