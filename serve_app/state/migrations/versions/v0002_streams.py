"""Streams that can be resumed, and whole answers by their key."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "streams",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("account", sa.String, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("keep_s", sa.Double),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("seen", sa.Double, nullable=False),
        sa.Column("frames", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("expires", sa.Double),
        sa.Column("request", sa.LargeBinary, nullable=False),
    )
    for name in ("account", "owner", "expires"):
        op.create_index(f"ix_streams_{name}", "streams", [name])
    op.create_table(
        "stream_parts",
        sa.Column("id", sa.String, sa.ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("upto", sa.BigInteger, nullable=False),
        sa.Column("frames", sa.LargeBinary, nullable=False),
        sa.Column("trail", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "stream_owners",
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("until", sa.Double, nullable=False),
    )
    op.create_table(
        "answers",
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("print", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("answer", sa.LargeBinary),
    )
    op.create_index("answers_by_age", "answers", ["account", "created"])
