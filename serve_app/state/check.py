"""What a start asks of the store before anything is started: whether it may be used, an answer on the terminal and not
in a log; and what was said of models by hand.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from serve_app.catalog.operated import Operated
from serve_app.state.errors import Away, unreachable
from serve_app.state.migrations import HEAD
from serve_app.state.names import FILE, OLD_FILES
from serve_app.state.operated import of_row


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


def read_operated(home: Path, database: str | None) -> dict[str, Operated]:
    """What an operator has said of models by hand, by model. Raises :class:`StateError` where it cannot be read."""
    if database is None:
        if not (home / FILE).exists():
            return {}
        try:
            # Without the libraries that the store needs: a start does not wait for them.
            with closing(sqlite3.connect(home / FILE)) as db:
                db.row_factory = sqlite3.Row
                # All columns: a file of an older program has fewer.
                rows = [dict(row) for row in db.execute("SELECT * FROM operated_models")]
        except sqlite3.Error:  # of an older program, or damaged: the gateways say so
            return {}
        return {row["model"]: of_row(**row) for row in rows}
    from serve_app.state.store.sql import SqlStore

    with SqlStore(home, database) as store:
        try:
            return store.operated.all()
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
