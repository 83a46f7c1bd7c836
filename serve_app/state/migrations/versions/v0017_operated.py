"""What an operator says of models by hand."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "operated_models",
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("running", sa.Boolean),
        sa.Column("bounds", sa.String, nullable=False),
    )
