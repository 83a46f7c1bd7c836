"""Messages of queues in the store: how they come in, and how runners take, answer and give up those for a model."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Waiting
from serve_app.state.deferred.queues import Answered, Consumer, Message, New, Queue, Task
from serve_app.state.store.database import Database
from serve_app.state.store.deferred.queue_tables import due, queues, sent_later
from serve_app.state.store.deferred.queue_tables import queue_messages as messages
from serve_app.state.store.spending.ledger import LedgerTable

_JSON = msgspec.json.Encoder()
_CONSUMER = msgspec.json.Decoder(Consumer)
_CALLER = msgspec.json.Decoder(Caller)
# Messages that one transaction drops at most.
_TRIM = 500
_EXPIRED = {"code": 3007, "message": "The request waited longer than its queue keeps messages, and was not run."}


class QueueWork:
    """The part of :class:`serve_app.state.deferred.queues.QueueStore` that changes messages within a transaction, and
    runs them.
    """

    def __init__(self, database: Database, ledger: LedgerTable) -> None:
        self._database = database
        self._ledger = ledger

    # -- within a transaction

    def add(self, connection: Connection, queue: Queue, new: Sequence[New], caller: Caller, now: float) -> None:
        """Messages behind those that are there."""
        told = _JSON.encode(caller).decode()
        rows = [
            {
                "id": each.id,
                "queue": queue.id,
                "visible": now + (queue.delay_s if each.delay_s is None else each.delay_s),
                "sent": now,
                "expires": now + queue.keep_s,
                "attempts": 0,
                "lease": "",
                "kind": each.kind,
                "caller": told,
                "size": len(each.body),
                "body": each.body,
            }
            for each in new
        ]
        if rows:
            connection.execute(self._database.insert(messages).on_conflict_do_nothing(), rows)

    def put(self, connection: Connection, account: str, queue_id: str, body: bytes, now: float) -> None:
        """A message of the server's own, into a queue that may be gone."""
        row = connection.execute(_where(account, queues.c.id == queue_id)).one_or_none()
        if row is not None:
            self._put(connection, row, [New(secrets.token_hex(16), body)], Caller(account), now)

    def bury(self, connection: Connection, account: str, dead: str, message_id: str, now: float) -> None:
        """After the last attempt: to the queue of the name ``dead``, or away."""
        row = connection.execute(_where(account, queues.c.name == dead)).one_or_none() if dead else None
        if row is None:
            connection.execute(sa.delete(messages).where(messages.c.id == message_id))
            return
        moved = {"queue": row.id, "lease": "", "attempts": 0, "visible": now + row.delay_s, "expires": now + row.keep_s}
        connection.execute(sa.update(messages).where(messages.c.id == message_id).values(**moved))

    def _put(self, connection: Connection, row: sa.Row, new: Sequence[New], caller: Caller, now: float) -> None:
        queue = Queue(row.id, row.account, row.name, 0.0, 0.0, row.delay_s, row.keep_s)
        self.add(connection, queue, new, caller, now)

    # -- running

    def waiting(self, now: float) -> dict[str, Waiting]:
        joined = messages.join(queues, queues.c.id == messages.c.queue)
        counted = sa.select(queues.c.model, sa.func.count(), sa.func.min(messages.c.expires)).select_from(joined)
        there = (queues.c.model > "") & ~queues.c.paused & due(now)
        with self._database.reading() as connection:
            rows = connection.execute(counted.where(there).group_by(queues.c.model)).all()
        return {model: Waiting(count, expires) for model, count, expires in rows}

    def take(self, models: Collection[str], limit: int, now: float, until: float) -> list[Task]:
        bound = sa.select(queues).where(queues.c.model.in_(models), ~queues.c.paused)
        found: list[Task] = []
        with self._database.reading() as connection:
            of = list(connection.execute(bound))
        if not of:
            return found
        # A share for each queue, so that a long one holds no other up.
        share = max(1, limit // len(of))
        with self._database.writing() as connection:
            for row in of:
                query = sa.select(messages).where((messages.c.queue == row.id) & due(now))
                query = query.order_by(messages.c.visible, messages.c.sent).limit(min(share, limit - len(found)))
                for each in connection.execute(query.with_for_update(skip_locked=True)).all():
                    lease = f"{each.id}.{secrets.token_hex(8)}"
                    taken = {"lease": lease, "attempts": each.attempts + 1, "visible": until}
                    connection.execute(sa.update(messages).where(messages.c.id == each.id).values(**taken))
                    message = Message(each.id, row.id, each.body, each.kind, each.sent, each.attempts + 1, lease)
                    found.append(Task(message, _CALLER.decode(each.caller), _CONSUMER.decode(row.consumer)))
        return found

    def renew(self, leases: Collection[str], until: float) -> set[str]:
        put = sa.update(messages).where(messages.c.lease.in_(leases)).values(visible=until)
        with self._database.writing() as connection:
            return set(connection.execute(put.returning(messages.c.lease)).scalars())

    def again(self, task: Task, at: float, *, counts: bool) -> None:
        attempts = messages.c.attempts if counts else messages.c.attempts - 1
        put = sa.update(messages).where(messages.c.lease == task.message.lease)
        with self._database.writing() as connection:
            connection.execute(put.values(lease="", visible=at, attempts=attempts))

    def answer(self, answered: Sequence[Answered], now: float) -> set[str]:
        done: set[str] = set()
        # In one order, or two runners that have lost leases to each other would each wait for a row of the other's.
        in_order = sorted(answered, key=lambda one: one.task.message.id)
        with self._database.writing(durable=True) as connection:
            for each in in_order:
                task = each.task
                message, account = task.message, task.caller.account
                mine = (messages.c.id == message.id) & (messages.c.lease == message.lease)
                if each.dead and task.consumer.dead:
                    # Locked, as what is deleted is.
                    held = sa.update(messages).where(mine).values(lease="")
                    if not connection.execute(held).rowcount:
                        continue
                    self.bury(connection, account, task.consumer.dead, message.id, now)
                elif not connection.execute(sa.delete(messages).where(mine)).rowcount:
                    continue
                self._results(connection, task.caller, task.consumer.results, message.id, each.body, now)
                if each.entries:
                    self._ledger.write(connection, [row.columns for row in each.entries])
                done.add(message.id)
        return done

    def _results(
        self, connection: Connection, caller: Caller, results: str, message_id: str, body: bytes, now: float
    ) -> None:
        row = connection.execute(_where(caller.account, queues.c.name == results)).one_or_none()
        if row is not None:
            new = New(hashlib.sha256(f"answer.{message_id}".encode()).hexdigest()[:32], body)
            self._put(connection, row, [new], caller, now)

    def trim(self, now: float) -> None:
        later = sent_later(now)
        with self._database.reading() as connection:
            moved = connection.execute(sa.select(messages.c.id).where(later).limit(1)).first() is not None
        if moved:
            with self._database.writing() as connection:
                right = {"sent": now, "visible": now + messages.c.visible - messages.c.sent}
                connection.execute(sa.update(messages).where(later).values(**right))
        old = sa.select(messages.c.id).where(messages.c.expires <= now).limit(_TRIM)
        with self._database.reading() as connection:
            if connection.execute(old.limit(1)).first() is None:
                return
        with self._database.writing() as connection:
            gone = sa.delete(messages).where(messages.c.id.in_(old.with_for_update(skip_locked=True)))
            rows = connection.execute(gone.returning(messages.c.id, messages.c.queue, messages.c.caller)).all()
            bound = sa.select(queues.c.id, queues.c.results).where(queues.c.id.in_({row.queue for row in rows}))
            results = {row.id: row.results for row in connection.execute(bound)}
            for row in rows:
                if name := results.get(row.queue):
                    body = {"request_id": row.id, "status": 408, "result": {}, "success": False, "errors": [_EXPIRED]}
                    told = _JSON.encode({**body, "messages": []})
                    self._results(connection, _CALLER.decode(row.caller), name, row.id, told, now)


def _where(account: str, which: sa.ColumnElement[bool]) -> sa.Select:
    return sa.select(queues).where(queues.c.account == account, which)
