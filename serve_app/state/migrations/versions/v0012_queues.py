"""Queues and their messages."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "queues",
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("account", "name")),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("created", "modified", "delay_s", "keep_s")),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("purged", sa.Double),
        *(sa.Column(name, sa.String, nullable=False) for name in ("consumer", "model", "results")),
    )
    op.create_index("queues_by_name", "queues", ["account", "name"], unique=True)
    op.create_index("ix_queues_model", "queues", ["model"])
    op.create_table(
        "queue_messages",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("queue", sa.String, sa.ForeignKey("queues.id", ondelete="CASCADE"), nullable=False),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("visible", "sent", "expires")),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("lease", "kind", "caller")),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("queue_messages_by_time", "queue_messages", ["queue", "visible", "sent"])
    op.create_index("ix_queue_messages_expires", "queue_messages", ["expires"])
    op.create_index("queue_messages_by_lease", "queue_messages", ["lease"])
