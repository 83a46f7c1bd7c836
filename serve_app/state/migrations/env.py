"""Run by Alembic, on the connection that :mod:`serve_app.state.store.migrate` hands over."""

from __future__ import annotations

from alembic import context

# Whoever merely imports this, as tests do with every module, has no environment and wants nothing done.
if hasattr(context, "config"):
    given = context.config.attributes
    context.configure(connection=given["connection"], target_metadata=given["metadata"], transactional_ddl=True)
    context.run_migrations()
