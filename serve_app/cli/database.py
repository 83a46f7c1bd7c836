"""``serve-app db status | upgrade | backup``, on the store itself, whether or not a server runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from serve_app.cli.groups import Group, open_store


def add_parser(commands: Any) -> None:
    database = Group(commands, "db", "the store of accounts, limits, stored responses and traces")
    database.action("status", "where it is, and which schema it has", _status)
    database.action("upgrade", "bring its schema to this program's, as every start does", _upgrade)
    backup = database.action("backup", "write all of it to a file, while servers run", _backup)
    backup.add_argument("file", type=Path, help="a file that is not there yet")


def _status(arguments: argparse.Namespace) -> int:
    from serve_app.state.store import migrate

    with open_store(ready=False) as store:
        found, newest = migrate.version(store.database), migrate.HEAD
        print(f"database  {store.name}")
        print(f"schema    {found or 'none yet'} (this program's: {newest})")
    return 0


def _upgrade(arguments: argparse.Namespace) -> int:
    from serve_app.state.store import migrate

    with open_store(ready=False) as store:
        done = migrate.upgrade(store.database)
        store.open()
        print(f"{store.name}: {'upgraded to' if done else 'has'} schema {migrate.version(store.database)}")
    return 0


def _backup(arguments: argparse.Namespace) -> int:
    from serve_app.state.store.backup import back_up

    with open_store(ready=False) as store:
        back_up(store.database, arguments.file)
    print(f"{arguments.file}: {arguments.file.stat().st_size} bytes")
    return 0
