"""When accounts were removed, so that nothing of theirs comes back."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.create_table(
        "removed_accounts",
        sa.Column("account", sa.String, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
    )
