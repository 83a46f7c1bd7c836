"""Sums of days that are closed: by month, and by hour and day without account, key, adapter and batch."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_BY = ("account", "key", "model", "task", "adapter", "batch", "status", "currency")
_TOTALLED_BY = ("model", "task", "status", "currency")
_SUMMED = (
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
    "neurons",
    "money",
)


def upgrade() -> None:
    made = (("ledger_months", "month", _BY), ("ledger_hour_totals", "hour", _TOTALLED_BY))
    for name, period, by in (*made, ("ledger_day_totals", "day", _TOTALLED_BY)):
        op.create_table(
            name,
            sa.Column(period, sa.BigInteger, primary_key=True, autoincrement=False),
            *(sa.Column(column, sa.String, primary_key=True) for column in by),
            sa.Column("entries", sa.BigInteger, nullable=False),
            sa.Column("seconds", sa.Double, nullable=False),
            *(sa.Column(column, sa.BigInteger, nullable=False) for column in _SUMMED),
        )
    op.create_index("ledger_months_by_account", "ledger_months", ["account", "month"])
    closed = op.create_table("ledger_closed", sa.Column("until", sa.BigInteger, primary_key=True, autoincrement=False))
    # The first day with entries, or today: sums of the days before are complete, since there is nothing in them.
    first = op.get_bind().execute(sa.text("SELECT min(day) FROM ledger_days")).scalar()
    op.bulk_insert(closed, [{"until": int(time.time() // 86_400) if first is None else first}])
