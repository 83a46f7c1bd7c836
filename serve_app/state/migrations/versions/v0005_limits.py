"""Leases of limits, and alerts of budgets."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "leases",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("account", "key", "kind", "owner")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("window", "amount", "held", "asked")),
    )
    op.create_index("ix_leases_owner", "leases", ["owner"])
    op.create_table(
        "lease_owners",
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("beat", sa.Double, nullable=False),
    )
    op.create_table(
        "alerts",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("account", "key", "kind")),
        *(sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False) for name in ("window", "share")),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("spent", "limit", "tries")),
        sa.Column("due", sa.Double),
        sa.UniqueConstraint("id"),
    )
    op.create_index("ix_alerts_due", "alerts", ["due"])
