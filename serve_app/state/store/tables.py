"""The tables, declared once. A change of them comes with a migration in `serve_app/state/migrations/versions`."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, LargeBinary, MetaData, String, Table

metadata = MetaData()

accounts = Table(
    "accounts",
    metadata,
    Column("name", String, primary_key=True),
    Column("weight", Double, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    # SHA-256 of the key, in hex.
    Column("hash", String, primary_key=True),
    Column("account", String, ForeignKey("accounts.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("priority", String, nullable=False),
    # A date, YYYY-MM-DD.
    Column("created", String, nullable=False),
)

# Which state of a room this is: whoever changes the room adds one in the same transaction.
revisions = Table(
    "revisions",
    metadata,
    Column("name", String, primary_key=True),
    Column("revision", BigInteger, nullable=False),
)

# Requests of the minute (unix seconds // 60) that is counted.
rate_counts = Table(
    "rate_counts",
    metadata,
    Column("account", String, primary_key=True),
    Column("task", String, primary_key=True),
    Column("minute", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
)

# One turn of a conversation each; `previous` is the turn before. `turn`, `body`: JSON. `size`: bytes of both.
responses = Table(
    "responses",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False),
    Column("created", Double, nullable=False),
    Column("previous", String),
    Column("size", BigInteger, nullable=False),
    Column("turn", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("responses_by_age", "account", "created"),
)

# `ended`: unix seconds, of a request that still runs when it began. `body`: JSON.
traces = Table(
    "traces",
    metadata,
    Column("account", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("ended", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("traces_by_age", "ended"),
)
