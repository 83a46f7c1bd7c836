"""Adapters, and the contents that some had."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("account", "model", "name")),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("created", "modified")),
        sa.Column("description", sa.String, nullable=False),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("rank", "size")),
        sa.Column("opened", sa.Boolean, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("config", "weights", "problem")),
    )
    op.create_index("adapters_by_name", "adapters", ["account", "name"], unique=True)
    op.create_index("adapters_by_digest", "adapters", ["digest"])
    op.create_index("adapters_public", "adapters", ["public", "created", "id"])
    op.create_table(
        "adapter_blobs",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("left", sa.Double, nullable=False),
    )
