"""Streams that can be resumed, in the store: what each has shown, which gateway runs it, and until when it is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.kept.streams import CANCELLING, EXPIRED, LOST, RUNNING, Head, Running, Shown, StreamPart, Taken
from serve_app.state.store.database import Database
from serve_app.state.store.spending.ledger import LedgerTable
from serve_app.state.store.tables import AHEAD_S, stream_owners, stream_parts, streams

# A request that takes its gateway down with it must not take down all of them.
MAX_EPOCHS = 5
# For how long an expired stream is told from one that never was.
TOMBSTONE_S = 86_400.0
# What goes beyond an account's bytes, counted from the newest; what runs stays.
_TRIM = sa.text("""
UPDATE streams SET expires = :now WHERE expires > :now AND id IN (
    SELECT id FROM (
        SELECT id, sum(size) OVER (PARTITION BY account ORDER BY created DESC, id DESC) AS total
        FROM streams WHERE status <> 'expired'
    ) AS counted WHERE total > :bytes
)
""")


def living(now: float) -> sa.Select[tuple[str]]:
    """The gateways that say that they live. One that says so for long to come said it by a clock that was put back: it
    says it again within a second if it does.
    """
    until = stream_owners.c.until
    return sa.select(stream_owners.c.owner).where(until > now, until <= now + AHEAD_S)


class StreamTable:
    """Keeps ``max_bytes`` per account, of streams that have ended; the oldest go first."""

    def __init__(self, database: Database, ledger: LedgerTable, *, max_bytes: int = 64 << 20) -> None:
        self._database = database
        self._ledger = ledger
        self.max_bytes = max_bytes

    def write(
        self,
        owner: str,
        parts: Sequence[StreamPart],
        now: float,
        until: float,
        last: Callable[[], tuple[float, Sequence[Head]]] | None = None,
    ) -> set[str]:
        """Writes parts, all or none; writing one twice is writing it once. ``until``: see :meth:`beat`. ``last`` is
        asked when all is written, which may take its time: ``until`` as it is then, and what :meth:`refuse` is to be
        told, so that nobody sees these streams. Answers with the ids of streams that are no longer this gateway's, of
        which nothing was written.

        A stream's end and what it costs are written in one transaction: whoever ends it has charged it, once.
        """
        refused: set[str] = set()
        entries: list[dict[str, Any]] = []
        with self._database.writing() as connection:
            for part in parts:
                if part.head is not None:
                    self._begin(connection, owner, part.head, now)
                if self._grow(connection, owner, part, now):
                    entries += part.entries
                else:
                    refused.add(part.id)
            if entries:
                self._ledger.write(connection, entries)
            if last is not None:
                until, heads = last()
                self._refuse(connection, owner, heads, now)
            if any(part.head is not None for part in parts):
                self._alive(connection, owner, until)
        return refused

    def _begin(self, connection: Connection, owner: str, head: Head, now: float) -> None:
        begun = {"owner": owner, "epoch": 1, "status": RUNNING, "seen": now, "frames": 0, "size": len(head.request)}
        columns = {name: getattr(head, name) for name in ("id", "account", "created", "keep_s", "request")}
        connection.execute(self._database.insert(streams).values(**columns, **begun).on_conflict_do_nothing())

    def _grow(self, connection: Connection, owner: str, part: StreamPart, now: float) -> bool:
        """Whether the stream is the owner's. The update locks its row, so that nobody takes it over in between."""
        own = (streams.c.id == part.id) & (streams.c.owner == owner) & (streams.c.epoch == part.epoch)
        known = {"frames": part.upto, "size": streams.c.size + len(part.frames) + len(part.trail)}
        if part.ending is not None:
            # What is to be kept no longer since it began, as when its account was removed.
            expires = sa.case((streams.c.keep_s == 0.0, now), else_=part.expires)
            known |= {"status": part.ending, "expires": expires}
        if not connection.execute(sa.update(streams).where(own).values(**known)).rowcount:
            return False
        columns = {name: getattr(part, name) for name in ("id", "number", "upto", "frames", "trail")}
        connection.execute(self._database.insert(stream_parts).values(**columns).on_conflict_do_nothing())
        return True

    def beat(self, owner: str, until: float, watched: Collection[str], now: float) -> list[Running]:
        """The owner lives until then, and clients are there for the ``watched``; what it runs, as the store has it."""
        with self._database.writing() as connection:
            self._alive(connection, owner, until)
            if watched:
                running = streams.c.expires.is_(None)
                connection.execute(sa.update(streams).where(streams.c.id.in_(watched), running).values(seen=now))
            query = sa.select(streams.c.id, streams.c.epoch, streams.c.seen, streams.c.status)
            rows = connection.execute(query.where(streams.c.owner == owner, streams.c.expires.is_(None)))
            return [Running(row.id, row.epoch, row.seen, row.status == CANCELLING) for row in rows]

    def _alive(self, connection: Connection, owner: str, until: float) -> None:
        alive = self._database.insert(stream_owners).values(owner=owner, until=until)
        connection.execute(alive.on_conflict_do_update(index_elements=["owner"], set_={"until": until}))

    def orphans(self, now: float, limit: int) -> list[str]:
        """Streams whose gateway no longer says that it lives, the oldest first."""
        query = sa.select(streams.c.id).where(streams.c.expires.is_(None), streams.c.owner.not_in(living(now)))
        with self._database.reading() as connection:
            return list(connection.execute(query.order_by(streams.c.created).limit(limit)).scalars())

    def take(self, owner: str, stream_id: str, now: float) -> Taken | None:
        """Takes an orphan over; None if another was first, or if it has lost too many gateways: then it has failed."""
        orphan = (streams.c.id == stream_id) & streams.c.expires.is_(None) & streams.c.owner.not_in(living(now))
        with self._database.writing() as connection:
            taking = sa.update(streams).where(orphan).values(owner=owner, epoch=streams.c.epoch + 1, seen=now)
            if not connection.execute(taking).rowcount:
                return None
            row = connection.execute(sa.select(streams).where(streams.c.id == stream_id)).one()
            if row.epoch > MAX_EPOCHS:
                failed = {"status": LOST, "expires": now + (TOMBSTONE_S if row.keep_s is None else row.keep_s)}
                connection.execute(sa.update(streams).where(streams.c.id == stream_id).values(**failed))
                return None
            query = sa.select(stream_parts.c.frames, stream_parts.c.trail).where(stream_parts.c.id == stream_id)
            parts = [(p.frames, p.trail) for p in connection.execute(query.order_by(stream_parts.c.number))]
        head = Head(row.id, row.account, row.created, row.keep_s, row.request)
        return Taken(head, row.epoch, row.status == CANCELLING, parts)

    def release(self, owner: str) -> None:
        """The owner ends: others may take over at once."""
        with self._database.writing() as connection:
            connection.execute(sa.delete(stream_owners).where(stream_owners.c.owner == owner))

    def refuse(self, owner: str, heads: Sequence[Head], now: float) -> set[str]:
        """These were refused to their clients before the store had answered. They are over, whether it has them, takes
        them yet, or another gateway has begun with one: whose epoch that is can add nothing. Answers with the ids of
        those that have come to their end before.
        """
        ids = [head.id for head in heads]
        with self._database.writing() as connection:
            self._refuse(connection, owner, heads, now)
            ended = sa.select(streams.c.id).where(streams.c.id.in_(ids), streams.c.status != EXPIRED)
            return set(connection.execute(ended).scalars())

    def _refuse(self, connection: Connection, owner: str, heads: Sequence[Head], now: float) -> None:
        if not heads:
            return
        over = {"owner": owner, "status": EXPIRED, "expires": now, "request": b"", "size": 0}
        for head in heads:
            row = {name: getattr(head, name) for name in ("id", "account", "created", "keep_s")}
            made = self._database.insert(streams).values(**row, **over, epoch=2, seen=now, frames=0)
            known = {**over, "epoch": streams.c.epoch + 1}
            running = streams.c.expires.is_(None)
            connection.execute(made.on_conflict_do_update(index_elements=["id"], set_=known, where=running))
        gone = sa.select(streams.c.id).where(streams.c.id.in_([h.id for h in heads]), streams.c.status == EXPIRED)
        connection.execute(sa.delete(stream_parts).where(stream_parts.c.id.in_(gone)))

    def shown(self, account: str, stream_id: str, after: int) -> Shown | None:
        """What there is beyond the first ``after`` frames; None: no such stream of this account."""
        query = sa.select(streams.c.status).where(streams.c.id == stream_id, streams.c.account == account)
        beyond = (stream_parts.c.id == stream_id) & (stream_parts.c.upto > after)
        parts = sa.select(stream_parts.c.frames).where(beyond)
        with self._database.reading() as connection:
            status = connection.execute(query).scalar_one_or_none()
            if status is None:
                return None
            found = connection.execute(parts.order_by(stream_parts.c.number).limit(200))
            return Shown(status, list(found.scalars()))

    def cancel(self, account: str, stream_id: str) -> str | None:
        """Asks whoever runs the stream to end it; its status, None: no such stream of this account."""
        own = (streams.c.id == stream_id) & (streams.c.account == account)
        with self._database.writing() as connection:
            connection.execute(sa.update(streams).where(own, streams.c.expires.is_(None)).values(status=CANCELLING))
            return connection.execute(sa.select(streams.c.status).where(own)).scalar_one_or_none()

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """The account ends, and its streams; those that run are forgotten once their gateways have ended them."""
        own = streams.c.account == account
        connection.execute(sa.delete(streams).where(own, streams.c.expires.is_not(None)))
        connection.execute(sa.update(streams).where(own).values(status=CANCELLING, keep_s=0.0))

    def trim(self, now: float) -> None:
        """Forgets what has expired or is too much."""
        with self._database.writing() as connection:
            connection.execute(_TRIM, {"now": now, "bytes": self.max_bytes})
            old = (streams.c.expires <= now) & (streams.c.status != EXPIRED)
            gone = list(connection.execute(sa.select(streams.c.id).where(old).limit(1000)).scalars())
            connection.execute(sa.delete(stream_parts).where(stream_parts.c.id.in_(gone)))
            forgotten = {"status": EXPIRED, "request": b"", "size": 0}
            connection.execute(sa.update(streams).where(streams.c.id.in_(gone)).values(**forgotten))
            connection.execute(sa.delete(streams).where(streams.c.expires <= now - TOMBSTONE_S))
            connection.execute(sa.delete(stream_owners).where(stream_owners.c.until <= now - TOMBSTONE_S))
