"""Requests of a minute are leased: the counts of programs before there were leases go."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.drop_table("rate_counts")
