"""Accounts and their keys, in the store."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.accounts import Account, Key, Priority, check_name, check_weight, hash_key
from serve_app.state.errors import AccountsError
from serve_app.state.store import revisions
from serve_app.state.store.database import Database
from serve_app.state.store.tables import accounts, keys


class AccountTables:
    """Every change bumps the revision :attr:`NAME`, and gateways read the accounts again."""

    NAME = "accounts"

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, Account]:
        """By name."""
        with self._database.reading() as connection:
            held: dict[str, list[Key]] = {}
            for row in connection.execute(sa.select(keys).order_by(keys.c.created, keys.c.hash)):
                held.setdefault(row.account, []).append(Key(row.hash, row.priority, row.created))
            rows = connection.execute(sa.select(accounts).order_by(accounts.c.name))
            return {row.name: Account(row.name, row.weight, tuple(held.get(row.name, ()))) for row in rows}

    def add(self, name: str, *, weight: float | None = None, priority: Priority = "realtime") -> str:
        """A new key for an account, which is made if need be. Returns the key: it is kept nowhere."""
        check_name(name)
        if weight is not None:
            weight = check_weight(f"account {name}", weight)
        key = secrets.token_urlsafe(32)
        new = Key(hash_key(key), priority, datetime.date.today().isoformat())
        with self._database.writing() as connection:
            self._put(connection, name, weight, [new])
        return key

    def take(self, found: Iterable[Account]) -> None:
        """Accounts and keys that another store had. What is here already stays as it is."""
        with self._database.writing() as connection:
            here = set(connection.scalars(sa.select(accounts.c.name)))
            for account in found:
                self._put(connection, account.name, None if account.name in here else account.weight, account.keys)

    def remove(self, name: str, key_id: str | None = None) -> None:
        """Forgets an account, or one of its keys. Raises :class:`AccountsError` where there is none."""
        with self._database.writing() as connection:
            known = connection.execute(sa.select(accounts).where(accounts.c.name == name)).first() is not None
            if not known:
                raise AccountsError(f"There is no account {name[:80]!r}. `serve-app accounts list` shows them.")
            if key_id is None:
                connection.execute(sa.delete(keys).where(keys.c.account == name))
                connection.execute(sa.delete(accounts).where(accounts.c.name == name))
            else:
                held = connection.scalars(sa.select(keys.c.hash).where(keys.c.account == name))
                gone = [known for known in held if Key(known, "realtime", "").id == key_id]
                if not gone:
                    raise AccountsError(
                        f"Account {name} has no key {key_id[:80]!r}. `serve-app accounts list` shows them."
                    )
                connection.execute(sa.delete(keys).where(keys.c.hash.in_(gone)))
            revisions.bump(self._database, connection, self.NAME)

    def _put(self, connection: Connection, name: str, weight: float | None, new: Iterable[Key]) -> None:
        account = self._database.insert(accounts).values(name=name, weight=1.0 if weight is None else weight)
        if weight is None:
            connection.execute(account.on_conflict_do_nothing())
        else:
            connection.execute(account.on_conflict_do_update(index_elements=["name"], set_={"weight": weight}))
        for key in new:
            row = {"hash": key.hash, "account": name, "priority": key.priority, "created": key.created}
            connection.execute(self._database.insert(keys).values(**row).on_conflict_do_nothing())
        revisions.bump(self._database, connection, self.NAME)
