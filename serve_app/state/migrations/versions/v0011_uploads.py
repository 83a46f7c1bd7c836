"""Uploaded files."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("account", sa.String, nullable=False),
        sa.Column("purpose", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("blob", sa.String, nullable=False),
        sa.Column("expires", sa.Double),
        sa.Column("print", sa.String, nullable=False),
    )
    op.create_index("uploads_by_age", "uploads", ["account", "created", "id"])
    op.create_index("uploads_by_end", "uploads", ["expires"])
