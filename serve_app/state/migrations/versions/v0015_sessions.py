"""Sessions of people who have signed in."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("hash", sa.String, primary_key=True),
        sa.Column("key", sa.String, nullable=False),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("started", "used")),
        sa.Column("code", sa.String, unique=True),
        sa.Column("ended", sa.Boolean, nullable=False),
    )
    op.create_index("sessions_by_key", "sessions", ["key", "started"])
    op.create_index("sessions_by_age", "sessions", ["started"])
