"""Keys with ids, names, scopes, expiry, last use and limits; accounts with limits; members; the audit trail."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for name, default in (("label", ""), ("created", ""), ("limits", "{}")):
        op.add_column("accounts", sa.Column(name, sa.String, nullable=False, server_default=default))
    # What keys could do before there were scopes.
    texts = {"id": "", "name": "", "scopes": "inference,read", "member": "", "limits": "{}"}
    for name, default in texts.items():
        op.add_column("keys", sa.Column(name, sa.String, nullable=False, server_default=default))
    for name in ("starts", "expires", "used"):
        op.add_column("keys", sa.Column(name, sa.Double))
    op.add_column("keys", sa.Column("enabled", sa.Boolean, nullable=False, server_default=sa.true()))
    op.execute("UPDATE keys SET id = substr(hash, 1, 12)")
    op.create_index("keys_by_id", "keys", ["id"], unique=True)
    op.create_table(
        "members",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("account", sa.String, sa.ForeignKey("accounts.name", ondelete="CASCADE"), nullable=False),
        sa.Column("email", sa.String, nullable=False),
        sa.Column("scopes", sa.String, nullable=False),
        sa.Column("created", sa.String, nullable=False),
    )
    op.create_index("members_by_email", "members", ["account", "email"], unique=True)
    texts_of_audit = ("account", "actor", "via", "request", "action", "kind", "target", "changes")
    op.create_table(
        "audit",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in texts_of_audit),
    )
    op.create_index("audit_by_time", "audit", ["at"])
    op.create_index("audit_by_account", "audit", ["account", "at"])
