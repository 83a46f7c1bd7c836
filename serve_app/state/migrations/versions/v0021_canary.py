"""Which share of a model's requests another model answers."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("operated_models", sa.Column("canary", sa.String))
