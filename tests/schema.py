"""The schema of an empty database: Alembic makes it once for each kind of database and session. Every other one gets
the same statements without it, which is several times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from sqlalchemy import event
from sqlalchemy.engine import Connection

from serve_app.state.store import migrate


@contextmanager
def made_once() -> Iterator[None]:
    """In this process, until the block ends. What has a schema, of whatever version, is Alembic's."""
    known: dict[str, list[tuple[str, Any]]] = {}
    run = migrate._run

    def run_or_repeat(config: Any, connection: Connection) -> None:
        kind = connection.dialect.name
        if migrate._version(connection) is not None:
            run(config, connection)
        elif kind in known:
            for statement, parameters in known[kind]:
                connection.exec_driver_sql(statement, parameters)
        else:
            known[kind] = _said(connection, lambda: run(config, connection))

    with patch.object(migrate, "_run", run_or_repeat):
        yield


def _said(connection: Connection, work: Any) -> list[tuple[str, Any]]:
    """What changes the database while ``work`` runs."""
    said: list[tuple[str, Any]] = []

    def hear(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if not statement.lstrip().upper().startswith(("SELECT", "PRAGMA")):
            said.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", hear)
    work()
    event.remove(connection, "before_cursor_execute", hear)
    return said
