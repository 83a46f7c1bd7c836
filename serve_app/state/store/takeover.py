"""What earlier versions kept in files of their own goes into the store, once.

Each file is renamed to ``*.taken-over`` afterwards and never read again; it may be deleted. A file that appears anew,
such as an ``accounts.yaml`` from elsewhere, is taken over at the next start: what the store has already stays.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.state.callers.accounts_file import read_accounts
from serve_app.state.errors import StateError
from serve_app.state.names import OLD_ACCOUNTS, OLD_RATES, OLD_RESPONSES, OLD_TRACES
from serve_app.state.protocols import Row
from serve_app.state.store.migrate import locked

if TYPE_CHECKING:
    from serve_app.state.store.sql import SqlStore

_GROUP = 500


def take_over(home: Path, store: SqlStore) -> None:
    """Raises :class:`StateError` for a file that cannot be read; it says what to do."""
    if not any((home / name).exists() for name in _FILES):
        return
    with locked(store.database):
        for name, take in _FILES.items():
            path = home / name
            if path.exists():
                take(path, store)
                _mark(path)


def _accounts(path: Path, store: SqlStore) -> None:
    store.accounts.take(read_accounts(path).values())


def _responses(path: Path, store: SqlStore) -> None:
    names = ("id", "account", "created", "previous", "size", "turn", "body")
    _copy(path, "responses", names, "response", store)


def _traces(path: Path, store: SqlStore) -> None:
    _copy(path, "paths", ("account", "id", "ended", "body"), "trace", store)


def _nothing(path: Path, store: SqlStore) -> None:
    """Counts of a minute that is over or nearly so."""


_FILES: dict[str, Callable[[Path, SqlStore], None]] = {
    OLD_ACCOUNTS: _accounts,
    OLD_RESPONSES: _responses,
    OLD_TRACES: _traces,
    OLD_RATES: _nothing,
}


def _copy(path: Path, table: str, names: tuple[str, ...], kind: str, store: SqlStore) -> None:
    group: list[Row] = []
    for values in _read(path, f"SELECT {', '.join(names)} FROM {table}"):
        columns = dict(zip(names, values, strict=True))
        group.append(Row(kind, (columns["account"], columns["id"]), columns, 0))
        if len(group) == _GROUP:
            store.write(group)
            group = []
    store.write(group)


def _read(path: Path, query: str) -> Iterator[tuple]:
    """The rows, with those that are in the file's journal."""
    try:
        db = sqlite3.connect(path)
        try:
            yield from db.execute(query)
            # Nothing stays in a journal beside the file, which is about to have another name.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            db.close()
    except sqlite3.Error as error:
        raise StateError(
            f"{path} cannot be read ({error}). Repair it, or move it away to go on without what it holds."
        ) from None


def _mark(path: Path) -> None:
    marked, n = path.with_name(f"{path.name}.taken-over"), 1
    while marked.exists():
        n += 1
        marked = path.with_name(f"{path.name}.taken-over.{n}")
    path.rename(marked)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.with_name(f".{path.name}.lock").unlink(missing_ok=True)
