"""Attempts to sign in, counted over all gateways; what runners of batches do at this moment."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.create_table(
        "sign_in_attempts",
        sa.Column("address", sa.String, primary_key=True),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "runner_reports",
        sa.Column("runner", sa.String, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("live", sa.LargeBinary, nullable=False),
        sa.Column("counted", sa.LargeBinary, nullable=False),
    )
