"""Prompts and answers that are kept where an operator has said so."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "prompts",
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("at", "until")),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("prompts_by_age", "prompts", ["account", "at"])
    op.create_index("ix_prompts_until", "prompts", ["until"])
    op.create_table(
        "prompt_rules",
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("days", sa.Double, nullable=False),
    )
