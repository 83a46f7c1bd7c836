"""Which programs can use the schema, by the version that they know."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.create_table("schema_programs", sa.Column("version", sa.String, primary_key=True))
