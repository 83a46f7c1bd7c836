"""Run by Alembic, on the connection that :mod:`serve_app.state.store.migrate` hands over."""

from __future__ import annotations

from alembic import context

from serve_app.state.store.blobs.adapters import metadata

# Whoever merely imports this, as tests do with every module, has no environment and wants nothing done.
if hasattr(context, "config"):
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    context.run_migrations()
