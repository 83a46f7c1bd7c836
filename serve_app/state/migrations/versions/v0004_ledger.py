"""The ledger: an entry for each piece of work, and their sums by hour and day."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_BY = ("account", "key", "model", "task", "adapter", "batch", "status", "currency")
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
    op.create_table(
        "ledger",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("account", sa.String, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("adapter", sa.String, nullable=False),
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("units", sa.String, nullable=False),
        sa.Column("neurons", sa.BigInteger, nullable=False),
        sa.Column("money", sa.BigInteger, nullable=False),
        sa.Column("currency", sa.String, nullable=False),
    )
    op.create_index("ledger_by_age", "ledger", ["at"])
    op.create_index("ledger_by_account", "ledger", ["account", "at"])
    for name, period in (("ledger_hours", "hour"), ("ledger_days", "day")):
        op.create_table(
            name,
            sa.Column(period, sa.BigInteger, primary_key=True, autoincrement=False),
            *(sa.Column(column, sa.String, primary_key=True) for column in _BY),
            sa.Column("entries", sa.BigInteger, nullable=False),
            sa.Column("seconds", sa.Double, nullable=False),
            *(sa.Column(column, sa.BigInteger, nullable=False) for column in _SUMMED),
        )
        op.create_index(f"{name}_by_account", name, ["account", period])
