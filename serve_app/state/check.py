"""Whether a server may use its store, asked before anything is started: an answer on the terminal, not in a log."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from serve_app.state.errors import Away, unreachable
from serve_app.state.migrations import HEAD
from serve_app.state.names import FILE, OLD_FILES


def check(home: Path, database: str | None) -> None:
    """Opens the store where that may fail or have something to do. Raises :class:`StateError`.

    A file of this program's own schema, or none at all, needs no look, and a start does not wait for one.
    """
    if database is None and _nothing_to_do(home):
        return
    from serve_app.state.store.sql import SqlStore

    with SqlStore(home, database) as store:
        try:
            store.open()
        except Away as away:
            raise unreachable(away) from None


def _nothing_to_do(home: Path) -> bool:
    if any((home / name).exists() for name in OLD_FILES):
        return False
    if not (home / FILE).exists():
        return True
    try:
        with closing(sqlite3.connect(home / FILE)) as db:
            return db.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]
    except sqlite3.Error:
        return False
