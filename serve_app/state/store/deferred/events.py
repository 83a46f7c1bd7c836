"""Subscriptions to events, and deliveries of events to webhooks.

A delivery is an event that one webhook is to get. Gateways take those whose time has come and try; one that dies over
a delivery leaves it to the next, so a receiver may get an event twice, with the same id.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.audit import Action, Actor, Kind, local_actor
from serve_app.state.deferred.batches import Batch
from serve_app.state.deferred.events import (
    MAX_SUBSCRIPTIONS,
    OPERATOR,
    Delivery,
    Event,
    EventsError,
    Subscription,
    check_kinds,
    for_subscription,
    of_batch,
)
from serve_app.state.store.callers import audit
from serve_app.state.store.database import Database
from serve_app.state.store.deferred.queue_work import QueueWork
from serve_app.state.store.tables import deliveries, subscriptions

# How long a gateway has for one attempt before another may try.
CLAIM_S = 60.0
# The wait before attempt n, 72 hours together; after the last one a delivery is dead until somebody has it replayed.
BACKOFF_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 72000.0)
# How long deliveries are listed and can be replayed.
KEEP_S = 30 * 86400.0
_TRIM = 5000
# What the audit trail tells of a subscription, beside its events.
_AUDITED = ("name", "url", "queue", "model", "enabled")


class EventTable:
    """Who is told of what, and what is on its way."""

    def __init__(self, database: Database, queues: QueueWork) -> None:
        self._database = database
        self._queues = queues

    # -- telling

    def put(self, connection: Connection, account: str, event: Event, now: float, *, operator: bool = False) -> None:
        """Writes the event for all who want it, within the transaction that makes it true. ``operator``: for the
        settings as well.
        """
        query = sa.select(subscriptions).where(subscriptions.c.account == account)
        wanting = [found for row in connection.execute(query) if (found := _subscription(row)).wants(event)]
        for each in wanting:
            if each.queue:
                self._queues.put(connection, account, each.queue, for_subscription(event, each.id), now)
        to = [each.id for each in wanting if each.url]
        for subscription_id in [OPERATOR, *to] if operator else to:
            row = {
                "id": f"msg_{secrets.token_hex(12)}",
                "subscription": subscription_id,
                "account": account,
                "kind": event.kind,
                "at": now,
                "body": for_subscription(event, subscription_id),
                "tries": 0,
                "due": now,
                "sent": None,
                "trouble": "",
            }
            connection.execute(sa.insert(deliveries).values(**row))

    def batch(self, connection: Connection, batch: Batch, now: float) -> None:
        """Tells of the status that ``batch`` has come to, within the transaction that changes it."""
        if (event := of_batch(batch, now)) is not None:
            self.put(connection, batch.caller.account, event, now)

    # -- subscriptions

    def subscribe(
        self,
        account: str,
        now: float,
        *,
        kinds: Iterable[str],
        url: str = "",
        queue: str = "",
        name: str = "",
        model: str = "",
        enabled: bool = True,
        by: Actor | None = None,
    ) -> Subscription:
        """With its secret, which is shown this once. ``by`` None: the user of this process. Raises
        :class:`EventsError`.
        """
        secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}" if url else ""
        made = Subscription(
            secrets.token_hex(16), account, name, now, now, check_kinds(kinds), url, queue, model, enabled, secret
        )
        columns = {each: getattr(made, each) for each in Subscription.__slots__} | {"kinds": ",".join(made.kinds)}
        with self._database.writing() as connection:
            count = sa.select(sa.func.count()).select_from(subscriptions).where(subscriptions.c.account == account)
            if connection.execute(count).scalar_one() >= MAX_SUBSCRIPTIONS:
                raise EventsError(f"Account {account} has {MAX_SUBSCRIPTIONS} subscriptions already. Remove one.")
            connection.execute(sa.insert(subscriptions).values(**columns))
            _record(connection, by, "create", made.account, None, made)
        return made

    def subscriptions(self, account: str | None) -> list[Subscription]:
        """The oldest first, without secrets; None: of all accounts."""
        query = sa.select(subscriptions).order_by(subscriptions.c.created, subscriptions.c.id)
        if account is not None:
            query = query.where(subscriptions.c.account == account)
        with self._database.reading() as connection:
            return [replace(_subscription(row), secret="") for row in connection.execute(query)]

    def change(
        self, account: str, subscription_id: str, now: float, *, by: Actor | None = None, **fields: Any
    ) -> Subscription | None:
        """``fields``: of :class:`Subscription`. None: the account has none of that id."""
        own = (subscriptions.c.account == account) & (subscriptions.c.id == subscription_id)
        if "kinds" in fields:
            fields["kinds"] = ",".join(check_kinds(fields["kinds"]))
        with self._database.writing() as connection:
            before = connection.execute(sa.select(subscriptions).where(own).with_for_update()).one_or_none()
            if before is None:
                return None
            put = sa.update(subscriptions).where(own).values(**fields, modified=now)
            changed = _subscription(connection.execute(put.returning(subscriptions)).one())
            _record(connection, by, "update", account, _subscription(before), changed)
        return replace(changed, secret="")

    def unsubscribe(self, account: str, subscription_id: str, *, by: Actor | None = None) -> Subscription | None:
        """Ends it, and what is on its way to it. None: the account has none of that id."""
        own = (subscriptions.c.account == account) & (subscriptions.c.id == subscription_id)
        with self._database.writing() as connection:
            row = connection.execute(sa.select(subscriptions).where(own)).one_or_none()
            if row is None:
                return None
            connection.execute(sa.delete(subscriptions).where(own))
            connection.execute(sa.delete(deliveries).where(deliveries.c.subscription == subscription_id))
            _record(connection, by, "delete", account, _subscription(row), None)
        return replace(_subscription(row), secret="")

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """The account ends: nobody is told of anything for it any more, but the operator of what has been."""
        connection.execute(sa.delete(subscriptions).where(subscriptions.c.account == account))
        own = (deliveries.c.account == account) & (deliveries.c.subscription != OPERATOR)
        connection.execute(sa.delete(deliveries).where(own))

    # -- sending

    def take(
        self, now: float, limit: int, without: Collection[str] = (), but_of: Collection[str] = ()
    ) -> list[Delivery]:
        """Deliveries whose time has come, for ``CLAIM_S`` of this gateway alone; none to the subscriptions ``without``,
        nor to subscriptions of the accounts ``but_of``. Those of a subscription that is switched off wait.
        """
        enabled = sa.select(subscriptions.c.id).where(subscriptions.c.enabled)
        ready = (
            (deliveries.c.due <= now)
            & deliveries.c.subscription.not_in(without)
            & (
                (deliveries.c.subscription == OPERATOR)
                | (deliveries.c.subscription.in_(enabled) & deliveries.c.account.not_in(but_of))
            )
        )
        query = sa.select(deliveries.c.id).where(ready).order_by(deliveries.c.due).limit(limit)
        # Most of the time there are none, and a transaction that writes would keep others waiting.
        with self._database.reading() as connection:
            if connection.execute(query.limit(1)).first() is None:
                return []
        if not self._database.is_sqlite:
            query = query.with_for_update(skip_locked=True)
        with self._database.writing() as connection:
            ids = list(connection.execute(query).scalars())
            claimed = {"due": now + CLAIM_S, "tries": deliveries.c.tries + 1}
            connection.execute(sa.update(deliveries).where(deliveries.c.id.in_(ids)).values(**claimed))
            joined = deliveries.outerjoin(subscriptions, subscriptions.c.id == deliveries.c.subscription)
            found = sa.select(deliveries, subscriptions.c.url, subscriptions.c.secret).select_from(joined)
            rows = connection.execute(found.where(deliveries.c.id.in_(ids))).all()
        return [
            replace(_delivery(row), tries=row.tries - 1, url=row.url or "", secret=row.secret or "") for row in rows
        ]

    def delivered(self, delivery_id: str, now: float) -> None:
        """Its receiver has it."""
        with self._database.writing() as connection:
            done = {"due": None, "sent": now, "trouble": ""}
            connection.execute(sa.update(deliveries).where(deliveries.c.id == delivery_id).values(**done))

    def later(self, delivery: Delivery, now: float, trouble: str) -> bool:
        """Its receiver did not take it: it is tried again, or it is dead (False)."""
        again = delivery.tries < len(BACKOFF_S)
        due = now + BACKOFF_S[delivery.tries] if again else None
        with self._database.writing() as connection:
            put = sa.update(deliveries).where(deliveries.c.id == delivery.id, deliveries.c.sent.is_(None))
            connection.execute(put.values(due=due, trouble=trouble[:500]))
        return again

    def gone(self, delivery: Delivery, now: float) -> None:
        """Its receiver says that it wants nothing more: the subscription is switched off."""
        with self._database.writing() as connection:
            off = sa.update(subscriptions).where(subscriptions.c.id == delivery.subscription)
            connection.execute(off.values(enabled=False, modified=now))
            dead = {"due": None, "trouble": "the receiver is gone (410)"}
            connection.execute(sa.update(deliveries).where(deliveries.c.id == delivery.id).values(**dead))

    def deliveries(self, subscription_id: str, *, limit: int = 100) -> list[Delivery]:
        """The newest first."""
        query = sa.select(deliveries).where(deliveries.c.subscription == subscription_id)
        query = query.order_by(deliveries.c.at.desc(), deliveries.c.id).limit(limit)
        with self._database.reading() as connection:
            return [_delivery(row) for row in connection.execute(query)]

    def replay(
        self, subscription_id: str, now: float, *, since: float = 0.0, delivery_id: str = "", everything: bool = False
    ) -> int:
        """Has deliveries sent again, under the ids they had: dead ones, or ``everything``; how many."""
        which = (deliveries.c.subscription == subscription_id) & (deliveries.c.at >= since) & deliveries.c.due.is_(None)
        if delivery_id:
            which &= deliveries.c.id == delivery_id
        elif not everything:
            which &= deliveries.c.sent.is_(None)
        with self._database.writing() as connection:
            again = sa.update(deliveries).where(which).values(due=now, tries=0, sent=None, trouble="")
            return connection.execute(again).rowcount

    def trim(self, now: float) -> None:
        old = sa.select(deliveries.c.id).where(deliveries.c.at < now - KEEP_S).limit(_TRIM)
        with self._database.writing() as connection:
            connection.execute(sa.delete(deliveries).where(deliveries.c.id.in_(old)))


def _record(
    connection: Connection,
    by: Actor | None,
    action: Action,
    account: str,
    before: Subscription | None,
    after: Subscription | None,
) -> None:
    """An entry of the audit trail; the secret is none of its business."""
    known = before or after
    assert known is not None
    told = [
        None if one is None else {name: getattr(one, name) for name in _AUDITED} | {"events": ",".join(one.kinds)}
        for one in (before, after)
    ]
    kind: Kind = "webhook" if known.url else "subscription"
    audit.record(connection, by or local_actor(), action, kind, account, known.id, *told)


def _subscription(row: sa.Row) -> Subscription:
    found = {name: getattr(row, name) for name in Subscription.__slots__}
    return Subscription(**found | {"kinds": tuple(row.kinds.split(","))})


def _delivery(row: sa.Row) -> Delivery:
    return Delivery(
        row.id, row.subscription, row.account, row.kind, row.at, row.body, row.tries, row.due, row.sent, row.trouble
    )
