"""Queues in the store, for those who push and pull. What models run of them is in :mod:`.queue_work`."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.queues import (
    MAX_QUEUES,
    Acknowledged,
    Backlog,
    Consumer,
    Message,
    New,
    Queue,
    QueueError,
)
from serve_app.state.store.deferred.queue_tables import due, queues
from serve_app.state.store.deferred.queue_tables import queue_messages as messages
from serve_app.state.store.deferred.queue_work import QueueWork
from serve_app.state.store.tables import subscriptions

_JSON = msgspec.json.Encoder()
_CONSUMER = msgspec.json.Decoder(Consumer)
_PLAIN = tuple(name for name in Queue.__slots__ if name != "consumer")
_GROUP = 5000


class QueueTables(QueueWork):
    """:class:`serve_app.state.deferred.queues.QueueStore`."""

    # -- queues

    def create(self, account: str, name: str, now: float) -> Queue:
        made = Queue(secrets.token_hex(16), account, name, now, now)
        row = {each: getattr(made, each) for each in _PLAIN} | {"consumer": "", "model": "", "results": ""}
        put = self._database.insert(queues).values(**row).on_conflict_do_nothing(index_elements=["account", "name"])
        with self._database.writing(durable=True) as connection:
            count = sa.select(sa.func.count()).select_from(queues).where(queues.c.account == account)
            if connection.execute(count).scalar_one() >= MAX_QUEUES:
                raise QueueError(f"Account {account} has {MAX_QUEUES} queues already. Delete one.")
            if connection.execute(put.returning(queues.c.id)).first() is None:
                raise QueueError(f"There is a queue {name} already. Choose another name.")
        return made

    def find(self, account: str, queue_id: str) -> Queue | None:
        with self._database.reading() as connection:
            row = connection.execute(sa.select(queues).where(_own(account, queue_id))).one_or_none()
        return None if row is None else _queue(row)

    def all(self, account: str) -> list[Queue]:
        query = sa.select(queues).where(queues.c.account == account).order_by(queues.c.created, queues.c.id)
        with self._database.reading() as connection:
            return [_queue(row) for row in connection.execute(query)]

    def change(self, account: str, queue_id: str, now: float, **fields: Any) -> Queue | None:
        with self._database.writing(durable=True) as connection:
            row = connection.execute(sa.select(queues).where(_own(account, queue_id))).one_or_none()
            if row is None:
                return None
            changed = replace(_queue(row), modified=now, **fields)
            if changed.name != row.name:
                self._free(connection, account, row.name)
            self._check(connection, changed)
            consumer = changed.consumer
            columns = {name: getattr(changed, name) for name in _PLAIN}
            columns["consumer"] = "" if consumer is None else _JSON.encode(consumer).decode()
            columns["model"] = "" if consumer is None else consumer.model
            columns["results"] = "" if consumer is None else consumer.results
            connection.execute(sa.update(queues).where(_own(account, queue_id)).values(**columns))
        return changed

    def _check(self, connection: Connection, changed: Queue) -> None:
        query = sa.select(queues.c.name, queues.c.id).where(queues.c.account == changed.account)
        ids = {row.name: row.id for row in connection.execute(query)}
        if ids.get(changed.name, changed.id) != changed.id:
            raise QueueError(f"There is a queue {changed.name} already. Choose another name.")
        consumer = changed.consumer
        if consumer is None:
            return
        for name in (consumer.results, consumer.dead):
            if name and name not in ids:
                raise QueueError(f"There is no queue {name[:64]!r}. Create it first.")
            if name and ids[name] == changed.id:
                raise QueueError(f"The queue {name} cannot be its own results_queue or dead_letter_queue.")

    def remove(self, account: str, queue_id: str) -> bool:
        with self._database.writing(durable=True) as connection:
            row = connection.execute(sa.select(queues).where(_own(account, queue_id))).one_or_none()
            if row is None:
                return False
            self._free(connection, account, row.name)
            connection.execute(sa.delete(subscriptions).where(subscriptions.c.queue == queue_id))
            connection.execute(sa.delete(messages).where(messages.c.queue == queue_id))
            connection.execute(sa.delete(queues).where(queues.c.id == queue_id))
        return True

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """The account ends, and its queues with all messages."""
        of_account = sa.select(queues.c.id).where(queues.c.account == account)
        connection.execute(sa.delete(messages).where(messages.c.queue.in_(of_account)))
        connection.execute(sa.delete(queues).where(queues.c.account == account))

    def _free(self, connection: Connection, account: str, name: str) -> None:
        """Answers that somebody waits for must not get lost."""
        there = sa.select(queues.c.name).where(queues.c.account == account, queues.c.results == name)
        if (other := connection.execute(there.limit(1)).scalar_one_or_none()) is not None:
            raise QueueError(f"Answers of the queue {other} go to {name}. Remove the consumer of {other} first.")

    # -- messages

    def push(self, queue: Queue, new: Sequence[New], caller: Caller, now: float) -> None:
        with self._database.writing(durable=True) as connection:
            self.add(connection, queue, new, caller, now)

    def pull(self, queue: Queue, limit: int, lease_s: float, now: float) -> list[Message]:
        if queue.paused:
            return []
        consumer = queue.consumer or Consumer("", "http_pull", 0.0)
        query = (
            sa.select(messages)
            .where((messages.c.queue == queue.id) & due(now))
            .order_by(messages.c.visible, messages.c.sent)
            .limit(limit)
        )
        with self._database.reading() as connection:
            if connection.execute(query.with_only_columns(messages.c.id).limit(1)).first() is None:
                return []
        found: list[Message] = []
        with self._database.writing() as connection:
            # Those whose last attempt has ended without a word go away, and others come in their place.
            while len(found) < limit:
                rows = connection.execute(query.with_for_update(skip_locked=True)).all()
                for row in rows:
                    if row.attempts > consumer.retries:
                        self.bury(connection, queue.account, consumer.dead, row.id, now)
                    elif len(found) < limit:
                        lease = f"{row.id}.{secrets.token_hex(8)}"
                        taken = {"lease": lease, "attempts": row.attempts + 1, "visible": now + lease_s}
                        connection.execute(sa.update(messages).where(messages.c.id == row.id).values(**taken))
                        found.append(_message(row, row.attempts + 1, lease))
                if len(rows) < limit:
                    break
        return found

    def peek(self, queue: Queue, limit: int, now: float) -> list[Message]:
        there = (messages.c.queue == queue.id) & (messages.c.expires > now)
        query = sa.select(messages).where(there).order_by(messages.c.visible, messages.c.sent).limit(limit)
        with self._database.reading() as connection:
            return [_message(row, row.attempts, "") for row in connection.execute(query)]

    def settle(
        self, queue: Queue, acks: Collection[str], retries: Collection[tuple[str, float | None]], now: float
    ) -> Acknowledged:
        consumer = queue.consumer or Consumer("", "http_pull", 0.0)
        done = Acknowledged()
        with self._database.writing(durable=True) as connection:
            for lease in acks:
                if connection.execute(sa.delete(messages).where(_held(queue.id, lease))).rowcount:
                    done.acked += 1
                else:
                    done.unknown.append(lease)
            for lease, delay_s in retries:
                found = sa.select(messages.c.id, messages.c.attempts).where(_held(queue.id, lease))
                row = connection.execute(found).one_or_none()
                if row is None:
                    done.unknown.append(lease)
                    continue
                done.retried += 1
                if row.attempts > consumer.retries:
                    self.bury(connection, queue.account, consumer.dead, row.id, now)
                else:
                    again = {"lease": "", "visible": now + (consumer.delay_s if delay_s is None else delay_s)}
                    connection.execute(sa.update(messages).where(messages.c.id == row.id).values(**again))
        return done

    def purge(self, queue: Queue, now: float, message_ids: Collection[str] | None = None) -> int:
        which = messages.c.queue == queue.id
        if message_ids is not None:
            which &= messages.c.id.in_(message_ids)
        count, more = 0, True
        while more:
            some = sa.select(messages.c.id).where(which).limit(_GROUP)
            with self._database.writing() as connection:
                gone = connection.execute(sa.delete(messages).where(messages.c.id.in_(some))).rowcount
            count, more = count + gone, gone == _GROUP
        if message_ids is None:
            with self._database.writing() as connection:
                connection.execute(sa.update(queues).where(queues.c.id == queue.id).values(purged=now))
        return count

    def backlog(self, queue_id: str) -> Backlog:
        counted = sa.select(sa.func.count(), sa.func.sum(messages.c.size), sa.func.min(messages.c.sent))
        with self._database.reading() as connection:
            count, size, oldest = connection.execute(counted.where(messages.c.queue == queue_id)).one()
        return Backlog(count, int(size or 0), oldest)


def _own(account: str, queue_id: str) -> sa.ColumnElement[bool]:
    return (queues.c.id == queue_id) & (queues.c.account == account)


def _held(queue_id: str, lease: str) -> sa.ColumnElement[bool]:
    return (messages.c.queue == queue_id) & (messages.c.id == lease.partition(".")[0]) & (messages.c.lease == lease)


def _queue(row: sa.Row) -> Queue:
    consumer = _CONSUMER.decode(row.consumer) if row.consumer else None
    return Queue(**{name: getattr(row, name) for name in _PLAIN}, consumer=consumer)


def _message(row: sa.Row, attempts: int, lease: str) -> Message:
    return Message(row.id, row.queue, row.body, row.kind, row.sent, attempts, lease)
