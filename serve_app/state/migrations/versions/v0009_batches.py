"""Batches, their shards and results."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_COUNTS = ("total", "succeeded", "failed", "cancelled", "expired")
_USED = ("input_tokens", "cached_tokens", "output_tokens", "neurons", "money")


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("account", sa.String, nullable=False),
        sa.Column("door", sa.String, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("deadline", sa.Double, nullable=False),
        sa.Column("keep_s", sa.Double, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        *(sa.Column(name, sa.LargeBinary, nullable=False) for name in ("about", "problems")),
        *(sa.Column(name, sa.String, nullable=False) for name in ("input", "output", "errors")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in (*_COUNTS, *_USED)),
        sa.Column("currency", sa.String, nullable=False),
        *(sa.Column(name, sa.Double) for name in ("started", "finalizing", "cancelling", "ended")),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("open", sa.BigInteger, nullable=False),
        sa.Column("expires", sa.Double),
    )
    op.create_index("batches_by_age", "batches", ["account", "created", "id"])
    op.create_index("batches_by_status", "batches", ["status", "deadline"])
    op.create_index("batches_by_end", "batches", ["expires", "account"])
    op.create_table(
        "batch_shards",
        sa.Column("batch", sa.String, sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("account", sa.String, nullable=False),
        sa.Column("deadline", sa.Double, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("blob", sa.String, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("done", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.String),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
    )
    in_turn = ["owner", "account", "deadline", "batch", "number"]
    op.create_index("batch_shards_in_turn", "batch_shards", in_turn)
    op.create_table(
        "batch_results",
        sa.Column("batch", sa.String, sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("id", sa.String),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("status", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("request_id", sa.String, nullable=False),
        sa.Column("used", sa.String, nullable=False),
    )
