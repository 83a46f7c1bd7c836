"""Subscriptions to events, and deliveries of events to webhooks; alerts that wait to be sent are deliveries now."""

import json
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_ALERTS = sa.table(
    "alerts", *map(sa.column, ("account", "key", "kind", "window", "share", "id", "at", "spent", "limit", "due"))
)
_UNITS = {"neurons": ("neurons_per_day", 10**6), "money": ("money_per_month", 10**9)}


def upgrade() -> None:
    op.create_table(
        "subscriptions",
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("account", "name")),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("created", "modified")),
        *(sa.Column(name, sa.String, nullable=False) for name in ("kinds", "url", "queue", "model")),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("secret", sa.String, nullable=False),
    )
    op.create_index("ix_subscriptions_account", "subscriptions", ["account"])
    op.create_index("ix_subscriptions_queue", "subscriptions", ["queue"])
    deliveries = op.create_table(
        "deliveries",
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("subscription", "account", "kind")),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("tries", sa.BigInteger, nullable=False),
        sa.Column("due", sa.Double),
        sa.Column("sent", sa.Double),
        sa.Column("trouble", sa.String, nullable=False),
    )
    op.create_index("ix_deliveries_at", "deliveries", ["at"])
    op.create_index("ix_deliveries_due", "deliveries", ["due"])
    op.create_index("deliveries_by_subscription", "deliveries", ["subscription", "at"])
    connection = op.get_bind()
    for row in connection.execute(sa.select(_ALERTS).where(_ALERTS.c.due.is_not(None))).all():
        told = {"subscription": "", "account": row.account, "kind": "budget.reached", "at": row.at, "due": row.due}
        connection.execute(
            sa.insert(deliveries).values(**told, id=row.id, body=_body(row), tries=0, sent=None, trouble="")
        )
    connection.execute(sa.update(_ALERTS).values(due=None))


def _body(row: sa.Row) -> bytes:
    family, _, currency = row.kind.partition(":")
    limit, unit = _UNITS[family]
    used, of = (f"{amount / unit:f}".rstrip("0").rstrip(".") for amount in (row.spent, row.limit))
    data = {"account": row.account, "key": row.key or None, "limit": limit, "share": row.share, "used": used, "of": of}
    data |= {"currency": currency} if currency else {}
    told = {"type": "budget.reached", "timestamp": _iso(row.at), "data": {**data, "since": _iso(row.window)}}
    return json.dumps(told).encode()


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
