"""Which state each room is in: what gateways ask several times a second to see whether to read a room again."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.store.database import Database
from serve_app.state.store.tables import revisions


def current(database: Database) -> dict[str, int]:
    """Revisions by room; a room that was never changed has none."""
    with database.reading() as connection:
        rows = connection.execute(sa.select(revisions.c.name, revisions.c.revision))
        return {name: revision for name, revision in rows}


def bump(database: Database, connection: Connection, name: str) -> None:
    """The room has changed, as of the end of this transaction."""
    first = database.insert(revisions).values(name=name, revision=1)
    connection.execute(
        first.on_conflict_do_update(index_elements=["name"], set_={"revision": revisions.c.revision + 1})
    )
