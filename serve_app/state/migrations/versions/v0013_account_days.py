"""Sums of closed days by account, and days of the ledger by an index of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_BY = ("account", "currency")
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
    totals = op.create_table(
        "ledger_account_totals",
        sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False),
        *(sa.Column(column, sa.String, primary_key=True) for column in _BY),
        sa.Column("entries", sa.BigInteger, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        *(sa.Column(column, sa.BigInteger, nullable=False) for column in _SUMMED),
    )
    op.create_index("ledger_account_totals_by_account", "ledger_account_totals", ["account", "day"])
    op.create_index("ledger_days_by_day", "ledger_days", ["day"])
    # Of the days that are closed already.
    summed = ", ".join(f"CAST(sum({name}) AS {'DOUBLE PRECISION' if name == 'seconds' else 'BIGINT'})" for name in
                       ("entries", "seconds", *_SUMMED))  # fmt: skip
    kept = ", ".join(("day", *_BY))
    op.execute(
        f"INSERT INTO {totals.name} ({kept}, entries, seconds, {', '.join(_SUMMED)}) "
        f"SELECT {kept}, {summed} FROM ledger_days WHERE day < (SELECT until FROM ledger_closed) GROUP BY {kept}"
    )
