"""Accounts and keys, revisions, rate counts, stored responses, traces."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "accounts", sa.Column("name", sa.String, primary_key=True), sa.Column("weight", sa.Double, nullable=False)
    )
    op.create_table(
        "keys",
        sa.Column("hash", sa.String, primary_key=True),
        sa.Column("account", sa.String, sa.ForeignKey("accounts.name", ondelete="CASCADE"), nullable=False),
        sa.Column("priority", sa.String, nullable=False),
        sa.Column("created", sa.String, nullable=False),
    )
    op.create_index("ix_keys_account", "keys", ["account"])
    op.create_table(
        "revisions",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "rate_counts",
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("task", sa.String, primary_key=True),
        sa.Column("minute", sa.BigInteger, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "responses",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("account", sa.String, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("previous", sa.String),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("responses_by_age", "responses", ["account", "created"])
    op.create_table(
        "traces",
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("ended", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("traces_by_age", "traces", ["ended"])
