"""Conversations that clients name, and their items."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "conversations",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("account", sa.String, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("used", sa.Double, nullable=False),
        sa.Column("next", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
    )
    op.create_index("conversations_by_use", "conversations", ["account", "used"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation", sa.String, sa.ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("position", sa.BigInteger, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("item", sa.LargeBinary, nullable=False),
    )
    op.create_index("conversation_items_by_id", "conversation_items", ["conversation", "id"], unique=True)
