"""Tables of queues, see :mod:`serve_app.state.deferred.queues`."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ColumnElement, Double, ForeignKey, Index, LargeBinary, String, Table

from serve_app.state.store.tables import AHEAD_S, metadata

# `consumer`: JSON of `serve_app.state.deferred.queues.Consumer`, "" for none; `model` and `results` (a queue's
# name) are its.
queues = Table(
    "queues",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False),
    Column("name", String, nullable=False),
    Column("created", Double, nullable=False),
    Column("modified", Double, nullable=False),
    Column("delay_s", Double, nullable=False),
    Column("keep_s", Double, nullable=False),
    Column("paused", Boolean, nullable=False),
    Column("purged", Double),
    Column("consumer", String, nullable=False),
    Column("model", String, nullable=False, index=True),
    Column("results", String, nullable=False),
    Index("queues_by_name", "account", "name", unique=True),
)

# `visible`: when it can be pulled, `expires`: when it is dropped (unix seconds). `lease`: of who has it until it is
# visible again, "" for nobody. `caller`: JSON of who pushed it.
queue_messages = Table(
    "queue_messages",
    metadata,
    Column("id", String, primary_key=True),
    Column("queue", String, ForeignKey("queues.id", ondelete="CASCADE"), nullable=False),
    Column("visible", Double, nullable=False),
    Column("sent", Double, nullable=False),
    Column("expires", Double, nullable=False, index=True),
    Column("attempts", BigInteger, nullable=False),
    Column("lease", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("caller", String, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("queue_messages_by_time", "queue", "visible", "sent"),
    Index("queue_messages_by_lease", "lease"),
)


def due(now: float) -> ColumnElement[bool]:
    """Messages that wait for nothing."""
    return (queue_messages.c.visible <= now) & (queue_messages.c.expires > now)


def sent_later(now: float) -> ColumnElement[bool]:
    """Messages that nobody has had, and that were sent before the clock was put back: they would wait until then."""
    return (queue_messages.c.sent > now + AHEAD_S) & (queue_messages.c.attempts == 0)
