"""``serve-app accounts add | list | remove`` and ``serve-app db status | upgrade | backup``.

They work on the store itself, whether or not a server runs; servers hear of changes within a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.config import load_settings
from serve_app.state.accounts import PRIORITIES
from serve_app.state.errors import Away, Damaged, StateError

if TYPE_CHECKING:
    from serve_app.state.store.sql import SqlStore


def add_accounts_parser(commands: Any) -> None:
    accounts = commands.add_parser("accounts", help="accounts and their keys, beside the one of the settings")
    actions = accounts.add_subparsers(required=True, metavar="ACTION")
    add = actions.add_parser("add", help="a new key for an account, which is made if need be; printed once")
    add.add_argument("name", help="the account's id, as it stands in URLs")
    add.add_argument("--weight", type=float, help="share of the tokens served while others wait (default 1)")
    add.add_argument("--priority", choices=PRIORITIES, default="realtime", help="of this key (default realtime)")
    add.set_defaults(command=_add)
    listed = actions.add_parser("list", help="accounts and the ids of their keys")
    listed.set_defaults(command=_list)
    remove = actions.add_parser("remove", help="forget an account, or one of its keys")
    remove.add_argument("name", help="the account's id")
    remove.add_argument("--key", help="only the key with this id")
    remove.set_defaults(command=_remove)


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
def _store(*, opened: bool = True) -> Iterator[SqlStore]:
    """Of the settings. A database that cannot be reached is a :class:`StateError` here: somebody waits for it."""
    from serve_app.state.store.sql import SqlStore

    settings = load_settings()
    with SqlStore(settings.home, settings.database) as store:
        try:
            if opened:
                store.open()
            yield store
        except Damaged as damaged:
            raise StateError(f"{damaged}.") from None
        except Away as away:
            raise StateError(f"The database cannot be reached: {away}. Start it, or correct the setting.") from None


def _add(arguments: argparse.Namespace) -> int:
    with _store() as store:
        key = store.accounts.add(arguments.name, weight=arguments.weight, priority=arguments.priority)
    print(key)
    print("This key is shown once; a running server takes it within a second.", file=sys.stderr)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with _store() as store:
        for account in store.accounts.all().values():
            keys = " ".join(f"{key.id}:{key.priority}:{key.created}" for key in account.keys) or "-"
            print(f"{account.name:24} weight {account.weight:<8g} {keys}")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    with _store() as store:
        store.accounts.remove(arguments.name, arguments.key)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from serve_app.state.store import migrate

    with _store(opened=False) as store:
        found, newest = migrate.version(store.database), migrate.HEAD
        print(f"database  {store.name}")
        print(f"schema    {found or 'none yet'} (this program's: {newest})")
    return 0


def _upgrade(arguments: argparse.Namespace) -> int:
    from serve_app.state.store import migrate

    with _store(opened=False) as store:
        done = migrate.upgrade(store.database)
        store.open()
        print(f"{store.name}: {'upgraded to' if done else 'has'} schema {migrate.HEAD}")
    return 0


def _backup(arguments: argparse.Namespace) -> int:
    from serve_app.state.store.backup import back_up

    with _store(opened=False) as store:
        back_up(store.database, arguments.file)
    print(f"{arguments.file}: {arguments.file.stat().st_size} bytes")
    return 0
