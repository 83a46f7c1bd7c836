"""The tables, declared once. A change of them comes with a migration in `serve_app/state/migrations/versions`."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    true,
)

metadata = MetaData()

# By so many seconds clocks of nodes may differ. What is later is of a clock that was put back: no claim lasts so long.
AHEAD_S = 60.0

# Versions of the schema that programs know which can use this one (`serve_app/state/migrations`).
schema_programs = Table("schema_programs", metadata, Column("version", String, primary_key=True))

accounts = Table(
    "accounts",
    metadata,
    Column("name", String, primary_key=True),
    Column("weight", Double, nullable=False),
    # What people call it.
    Column("label", String, nullable=False, server_default=""),
    # A time of UTC in ISO 8601; "" before there was this column.
    Column("created", String, nullable=False, server_default=""),
    # JSON of `serve_app.state.callers.limits.Limits`.
    Column("limits", String, nullable=False, server_default="{}"),
)

# People whose keys end with their membership. `scopes`: as in `keys`.
members = Table(
    "members",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, ForeignKey("accounts.name", ondelete="CASCADE"), nullable=False),
    Column("email", String, nullable=False),
    Column("scopes", String, nullable=False),
    Column("created", String, nullable=False),
    Index("members_by_email", "account", "email", unique=True),
)

keys = Table(
    "keys",
    metadata,
    # SHA-256 of the key, in hex.
    Column("hash", String, primary_key=True),
    Column("account", String, ForeignKey("accounts.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("priority", String, nullable=False),
    # A date, or a time of UTC in ISO 8601.
    Column("created", String, nullable=False),
    # How people and the ledger name it; stays when the key is rolled.
    Column("id", String, nullable=False, server_default=""),
    Column("name", String, nullable=False, server_default=""),
    # Joined by commas.
    Column("scopes", String, nullable=False, server_default="inference,read"),
    # Unix seconds.
    Column("starts", Double),
    Column("expires", Double),
    Column("used", Double),
    Column("enabled", Boolean, nullable=False, server_default=true()),
    # The id of the member whose key it is, or "".
    Column("member", String, nullable=False, server_default=""),
    Column("limits", String, nullable=False, server_default="{}"),
    Index("keys_by_id", "id", unique=True),
)

# Who changed what, never changed itself. `actor`: the id of a key or the name of a user; `via`: api, cli or python.
# `request`: the id of the request. `changes`: JSON, {field: [before, after]}.
audit = Table(
    "audit",
    metadata,
    Column("id", String, primary_key=True),
    Column("at", Double, nullable=False),
    Column("account", String, nullable=False),
    Column("actor", String, nullable=False),
    Column("via", String, nullable=False),
    Column("request", String, nullable=False),
    Column("action", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("target", String, nullable=False),
    Column("changes", String, nullable=False),
    Index("audit_by_time", "at"),
    Index("audit_by_account", "account", "at"),
)

# Which state of a room this is: whoever changes the room adds one in the same transaction.
revisions = Table(
    "revisions",
    metadata,
    Column("name", String, primary_key=True),
    Column("revision", BigInteger, nullable=False),
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

# Conversations that clients name. `used`: when something was last written. `next`: the next item's position. `size`:
# bytes of all items. `metadata`: JSON.
conversations = Table(
    "conversations",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False),
    Column("created", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("next", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Index("conversations_by_use", "account", "used"),
)

# What was said in them, in the order of `position`. `item`: JSON.
conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation", String, ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("id", String, nullable=False),
    Column("item", LargeBinary, nullable=False),
    Index("conversation_items_by_id", "conversation", "id", unique=True),
)

# `ended`: unix seconds, of a request that still runs when it began. `body`: JSON.
traces = Table(
    "traces",
    metadata,
    Column("account", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("ended", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
    # What lists are filtered by; null for traces of before there were lists.
    Column("model", String),
    Column("status", String),
    Column("ms", Double),
    Index("traces_by_age", "ended"),
    Index("traces_by_account", "account", "ended"),
)

# Streams that can be resumed. `owner`: the gateway that runs it, for the `epoch`-th time; a gateway of an earlier epoch
# can write nothing more. `keep_s`: how long it goes on without a client, and is kept after its end; None: to its end.
# `seen`: when a client was last there. `frames`: how many there are. `ended`, `expires`: unix seconds, None while it
# runs. `request`: msgpack, empty once expired.
streams = Table(
    "streams",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False, index=True),
    Column("created", Double, nullable=False),
    Column("keep_s", Double),
    Column("owner", String, nullable=False, index=True),
    Column("epoch", BigInteger, nullable=False),
    Column("status", String, nullable=False),
    Column("seen", Double, nullable=False),
    Column("frames", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("expires", Double, index=True),
    Column("request", LargeBinary, nullable=False),
)

# What a stream has shown, in parts: `frames`, the last of which is frame `upto`, and the tokens behind them (`trail`).
stream_parts = Table(
    "stream_parts",
    metadata,
    Column("id", String, ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("upto", BigInteger, nullable=False),
    Column("frames", LargeBinary, nullable=False),
    Column("trail", LargeBinary, nullable=False),
)

# Gateways that run streams, and until when each says that it lives (unix seconds).
stream_owners = Table(
    "stream_owners",
    metadata,
    Column("owner", String, primary_key=True),
    Column("until", Double, nullable=False),
)

# Whole answers by `Idempotency-Key`. `print`: SHA-256 of the request. `answer`: msgpack, None while it is computed by
# `owner`.
answers = Table(
    "answers",
    metadata,
    Column("account", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("created", Double, nullable=False),
    Column("print", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("answer", LargeBinary),
    Index("answers_by_age", "account", "created"),
)

# What work is counted in; the names of `serve_app.catalog.pricing.UNITS`.
UNIT_COLUMNS = (
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "audio_ms",
    "streamed_audio_ms",
    "characters",
    "images",
    "image_tiles",
    "image_steps",
    "input_tiles",
    "image_tile_steps",
    "input_tile_steps",
    "first_pixels",
    "further_pixels",
    "requests",
)
# What sums are kept by.
SUMMED_BY = ("account", "key", "model", "task", "adapter", "batch", "status", "currency")
TOTALLED_BY = ("model", "task", "status", "currency")
ACCOUNTED_BY = ("account", "currency")

# One piece of work each, see `serve_app.state.spending.ledger.Entry`. `at`: unix seconds. `units`: JSON. `neurons`:
# millionths. `money`: 1e-9 of `currency`.
ledger = Table(
    "ledger",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False),
    Column("key", String, nullable=False),
    Column("at", Double, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("model", String, nullable=False),
    Column("task", String, nullable=False),
    Column("adapter", String, nullable=False),
    Column("batch", String, nullable=False),
    Column("status", String, nullable=False),
    Column("units", String, nullable=False),
    Column("neurons", BigInteger, nullable=False),
    Column("money", BigInteger, nullable=False),
    Column("currency", String, nullable=False),
    Index("ledger_by_age", "at"),
    Index("ledger_by_account", "account", "at"),
)


def _sums(name: str, period: str, by: tuple[str, ...] = SUMMED_BY) -> Table:
    """Sums of the ledger, changed in the transaction that writes an entry. ``period``: unix seconds // its length.
    `entries`: how many; `seconds`: of all of them.
    """
    indexes = [Index(f"{name}_by_account", "account", period)] if "account" in by else []
    return Table(
        name,
        metadata,
        Column(period, BigInteger, primary_key=True, autoincrement=False),
        *(Column(column, String, primary_key=True) for column in by),
        Column("entries", BigInteger, nullable=False),
        Column("seconds", Double, nullable=False),
        *(Column(column, BigInteger, nullable=False) for column in (*UNIT_COLUMNS, "neurons", "money")),
        *indexes,
    )


ledger_hours = _sums("ledger_hours", "hour")
ledger_days = _sums("ledger_days", "day")
# Times of everybody: PostgreSQL does not take the primary key's for that, since it judges it by all its columns.
Index("ledger_days_by_day", ledger_days.c.day)

# Of closed days alone, see `serve_app.state.store.spending.closing`. `month`: the day with which it begins.
ledger_months = _sums("ledger_months", "month")
ledger_hour_totals = _sums("ledger_hour_totals", "hour", TOTALLED_BY)
ledger_day_totals = _sums("ledger_day_totals", "day", TOTALLED_BY)
ledger_account_totals = _sums("ledger_account_totals", "day", ACCOUNTED_BY)
# One row: all days before `until` are closed, counted from 1970-01-01.
ledger_closed = Table("ledger_closed", metadata, Column("until", BigInteger, primary_key=True, autoincrement=False))

# Which part of a limit a gateway may use: see `serve_app.state.spending.leases`. `window`: when its minute, day or
# month began, in unix seconds; 0 for none. `amount`: the lease, of which `held` is in use; `asked`: what the gateway
# wanted.
leases = Table(
    "leases",
    metadata,
    Column("account", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("owner", String, primary_key=True, index=True),
    Column("window", BigInteger, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("held", BigInteger, nullable=False),
    Column("asked", BigInteger, nullable=False),
)

# Gateways that have leases, and when each was last heard of (unix seconds).
lease_owners = Table(
    "lease_owners",
    metadata,
    Column("owner", String, primary_key=True),
    Column("beat", Double, nullable=False),
)

# Budgets that have reached a `share` (per cent) of their `limit` in a `window`. `tries`, `due`: of programs that sent
# alerts from here, which may still run; now events tell of them.
alerts = Table(
    "alerts",
    metadata,
    Column("account", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("window", BigInteger, primary_key=True, autoincrement=False),
    Column("share", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("at", Double, nullable=False),
    Column("spent", BigInteger, nullable=False),
    Column("limit", BigInteger, nullable=False),
    Column("tries", BigInteger, nullable=False),
    Column("due", Double, index=True),
)

# Who is told of which events, see `serve_app.state.deferred.events.Subscription`. `kinds`: joined by commas.
subscriptions = Table(
    "subscriptions",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False, index=True),
    Column("name", String, nullable=False),
    Column("created", Double, nullable=False),
    Column("modified", Double, nullable=False),
    Column("kinds", String, nullable=False),
    Column("url", String, nullable=False),
    Column("queue", String, nullable=False, index=True),
    Column("model", String, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("secret", String, nullable=False),
)

# Events on their way to a webhook, see `serve_app.state.deferred.events.Delivery`. `subscription`: "" for that of the
# settings.
deliveries = Table(
    "deliveries",
    metadata,
    Column("id", String, primary_key=True),
    Column("subscription", String, nullable=False),
    Column("account", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("at", Double, nullable=False, index=True),
    Column("body", LargeBinary, nullable=False),
    Column("tries", BigInteger, nullable=False),
    Column("due", Double, index=True),
    Column("sent", Double),
    Column("trouble", String, nullable=False),
    Index("deliveries_by_subscription", "subscription", "at"),
)
