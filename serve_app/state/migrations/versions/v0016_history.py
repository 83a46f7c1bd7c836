"""What was done in each minute and hour; and what lists of requests are filtered by."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "history",
        sa.Column("width", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("at", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("gateway", sa.String, primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("numbers", sa.LargeBinary, nullable=False),
    )
    op.create_index("history_by_age", "history", ["width", "at"])
    for name, kind in (("model", sa.String), ("status", sa.String), ("ms", sa.Double)):
        op.add_column("traces", sa.Column(name, kind))
    op.create_index("traces_by_account", "traces", ["account", "ended"])
