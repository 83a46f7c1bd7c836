"""``serve-app db status | upgrade | backup``, on the store itself, whether or not a server runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.config import load_settings
from serve_app.state.errors import Away, unreachable

if TYPE_CHECKING:
    from serve_app.state.store.sql import SqlStore


def add_database_parser(commands: Any) -> None:
    database = commands.add_parser("db", help="the store of accounts, limits, stored responses and traces")
    actions = database.add_subparsers(required=True, metavar="ACTION")
    status = actions.add_parser("status", help="where it is, and which schema it has")
    status.set_defaults(command=_status)
    upgrade = actions.add_parser("upgrade", help="bring its schema to this program's, as every start does")
    upgrade.set_defaults(command=_upgrade)
    backup = actions.add_parser("backup", help="write all of it to a file, while servers run")
    backup.add_argument("file", type=Path, help="a file that is not there yet")
    backup.set_defaults(command=_backup)


@contextmanager
def _store() -> Iterator[SqlStore]:
    """Of the settings. A database that cannot be reached is a :class:`StateError` here: somebody waits for it."""
    from serve_app.state.store.sql import SqlStore

    settings = load_settings()
    with SqlStore(settings.home, settings.database) as store:
        try:
            yield store
        except Away as away:
            raise unreachable(away) from None


def _status(arguments: argparse.Namespace) -> int:
    from serve_app.state.store import migrate

    with _store() as store:
        found, newest = migrate.version(store.database), migrate.HEAD
        print(f"database  {store.name}")
        print(f"schema    {found or 'none yet'} (this program's: {newest})")
    return 0


def _upgrade(arguments: argparse.Namespace) -> int:
    from serve_app.state.store import migrate

    with _store() as store:
        done = migrate.upgrade(store.database)
        store.open()
        print(f"{store.name}: {'upgraded to' if done else 'has'} schema {migrate.HEAD}")
    return 0


def _backup(arguments: argparse.Namespace) -> int:
    from serve_app.state.store.backup import back_up

    with _store() as store:
        back_up(store.database, arguments.file)
    print(f"{arguments.file}: {arguments.file.stat().st_size} bytes")
    return 0
