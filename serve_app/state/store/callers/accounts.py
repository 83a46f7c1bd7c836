"""Accounts, in the store, with all keys and members as gateways read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.accounts import (
    USUAL_SCOPES,
    Account,
    Key,
    Member,
    Priority,
    check_label,
    check_name,
    check_weight,
    now_text,
)
from serve_app.state.callers.audit import Actor, local_actor
from serve_app.state.callers.limits import Limits, read_limits
from serve_app.state.errors import AccountsError, Missing, Taken
from serve_app.state.store import revisions
from serve_app.state.store.callers import audit
from serve_app.state.store.callers.audit import AuditTable
from serve_app.state.store.callers.keys import KeyTable, as_key, joined
from serve_app.state.store.callers.members import MemberTable, as_member
from serve_app.state.store.callers.removed import note_removed
from serve_app.state.store.database import Database
from serve_app.state.store.tables import accounts, keys, members


class AccountTables:
    """Every change bumps the revision :attr:`NAME`, and gateways read the accounts again. Every method raises
    :class:`AccountsError`; ``by`` None is the user of this process. ``removes(connection, account, now)``: what an
    account had, which goes with it.
    """

    NAME = "accounts"

    def __init__(self, database: Database, *removes: Callable[[Connection, str, float], None]) -> None:
        self._database = database
        self._removes = removes
        self.keys = KeyTable(database)
        self.members = MemberTable(database)
        self.audit = AuditTable(database)

    def all(self, name: str | None = None) -> dict[str, Account]:
        """By name; only that of one account where a ``name`` is given."""
        of_account = accounts.c.name == name if name is not None else sa.true()
        with self._database.reading() as connection:
            held: dict[str, list[Key]] = {}
            query = sa.select(keys).where(keys.c.account == name if name is not None else sa.true())
            for row in connection.execute(query.order_by(keys.c.created, keys.c.id)):
                held.setdefault(row.account, []).append(as_key(row))
            people: dict[str, list[Member]] = {}
            listed = sa.select(members).where(members.c.account == name if name is not None else sa.true())
            for row in connection.execute(listed.order_by(members.c.created, members.c.id)):
                people.setdefault(row.account, []).append(as_member(row))
            rows = connection.execute(sa.select(accounts).where(of_account).order_by(accounts.c.name))
            return {row.name: _account(row, held, people) for row in rows}

    def get(self, name: str) -> Account:
        """Raises :class:`Missing`."""
        found = self.all(name)
        if name not in found:
            raise _missing(name)
        return found[name]

    def create(
        self,
        name: str,
        *,
        label: str = "",
        weight: float = 1.0,
        limits: Mapping[str, Any] | None = None,
        by: Actor | None = None,
    ) -> Account:
        """An account without keys. Raises :class:`Taken` where there is one of this name."""
        made = Account(check_name(name), check_weight(f"account {name}", weight), label=check_label(label))
        with self._database.writing() as connection:
            if not self._insert(connection, made, read_limits(limits or {}), by):
                raise Taken(f"There is an account {name!r} already. Choose another name, or change that one.")
            revisions.bump(self._database, connection, self.NAME)
        return self.get(name)

    def ensure(self, name: str, *, by: Actor | None = None) -> None:
        """There is an account of this name afterwards, as that of the settings need not be."""
        with self._database.writing() as connection:
            if self._insert(connection, Account(check_name(name)), Limits(), by):
                revisions.bump(self._database, connection, self.NAME)

    def change(
        self,
        name: str,
        *,
        label: str | None = None,
        weight: float | None = None,
        limits: Mapping[str, Any] | None = None,
        by: Actor | None = None,
    ) -> Account:
        """Changes what is given. ``limits`` are added to those there are; None in them takes one away."""
        with self._database.writing() as connection:
            row = connection.execute(sa.select(accounts).where(accounts.c.name == name).with_for_update()).first()
            if row is None:
                raise _missing(name)
            before = Limits.of_stored(row.limits)
            after: dict[str, Any] = {
                "label": row.label if label is None else check_label(label),
                "weight": row.weight if weight is None else check_weight(f"account {name}", weight),
                "limits": before if limits is None else read_limits(limits, before),
            }
            stored = {**after, "limits": after["limits"].stored()}
            connection.execute(sa.update(accounts).where(accounts.c.name == name).values(**stored))
            was = {"label": row.label, "weight": row.weight, "limits": before.shown()}
            now = {**after, "limits": after["limits"].shown()}
            audit.record(connection, by or local_actor(), "update", "account", name, name, was, now)
            revisions.bump(self._database, connection, self.NAME)
        return self.get(name)

    def remove(self, name: str, key_id: str | None = None, *, by: Actor | None = None) -> None:
        """Forgets an account with all that it has, but for its entries of the ledger, or one of its keys. Raises
        :class:`Missing`.
        """
        if key_id is not None:
            self.keys.remove(name, key_id, by=by)
            return
        with self._database.writing() as connection:
            row = connection.execute(sa.select(accounts).where(accounts.c.name == name).with_for_update()).first()
            if row is None:
                raise _missing(name)
            gone = connection.scalars(sa.select(keys.c.id).where(keys.c.account == name))
            was = {"label": row.label, "weight": row.weight, "keys": sorted(gone)}
            for table in (keys, members):
                connection.execute(sa.delete(table).where(table.c.account == name))
            now = time.time()
            for remove in self._removes:
                remove(connection, name, now)
            note_removed(self._database, connection, name, now)
            connection.execute(sa.delete(accounts).where(accounts.c.name == name))
            audit.record(connection, by or local_actor(), "delete", "account", name, name, was)
            revisions.bump(self._database, connection, self.NAME)

    def add(
        self,
        name: str,
        *,
        weight: float | None = None,
        priority: Priority = "realtime",
        by: Actor | None = None,
        **fields: Any,
    ) -> str:
        """A new key for an account, which is made if need be; see :meth:`KeyTable.create` for ``fields``. Returns the
        key: it is kept nowhere.
        """
        check_name(name)
        if weight is not None:
            weight = check_weight(f"account {name}", weight)
        fields = {"scopes": USUAL_SCOPES, "priority": priority, **fields}
        self.keys.check(fields)
        with self._database.writing() as connection:
            made = self._insert(connection, Account(name, 1.0 if weight is None else weight), Limits(), by)
            _, key = self.keys.insert(connection, name, fields, by)
            revisions.bump(self._database, connection, self.NAME)
        if weight is not None and not made:
            self.change(name, weight=weight, by=by)
        return key

    def take(self, found: Iterable[Account]) -> None:
        """Accounts and keys that another store had. What is here already stays as it is."""
        with self._database.writing() as connection:
            for account in found:
                self._insert(connection, account, account.limits, None)
                for key in account.keys:
                    row = {"hash": key.hash, "id": key.id, "account": account.name, "priority": key.priority}
                    row |= {"created": key.created, "name": key.name, "scopes": joined(key.scopes)}
                    connection.execute(self._database.insert(keys).values(**row).on_conflict_do_nothing())
            revisions.bump(self._database, connection, self.NAME)

    def _insert(self, connection: Connection, account: Account, limits: Limits, by: Actor | None) -> bool:
        """Whether it is new."""
        row = {"name": account.name, "weight": account.weight, "label": account.label, "created": now_text()}
        new = self._database.insert(accounts).values(**row, limits=limits.stored())
        if connection.execute(new.on_conflict_do_nothing().returning(accounts.c.name)).first() is None:
            return False
        shown = {"label": account.label, "weight": account.weight, "limits": limits.shown()}
        audit.record(connection, by or local_actor(), "create", "account", account.name, account.name, None, shown)
        return True


def _account(row: Any, held: Mapping[str, list[Key]], people: Mapping[str, list[Member]]) -> Account:
    found, here = tuple(held.get(row.name, ())), tuple(people.get(row.name, ()))
    limits = Limits.of_stored(row.limits)
    return Account(row.name, row.weight, found, row.label, row.created, limits, here)


def _missing(name: str) -> AccountsError:
    return Missing(f"There is no account {name[:80]!r}. The list of accounts shows what there is.")
