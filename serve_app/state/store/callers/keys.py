"""Keys, in the store: made, changed, rolled and ended."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.accounts import (
    ID_CHARS,
    USUAL_SCOPES,
    Key,
    Scope,
    check_label,
    check_priority,
    check_scopes,
    hash_key,
    now_text,
    sorted_scopes,
)
from serve_app.state.callers.audit import Actor, local_actor
from serve_app.state.callers.limits import NO_LIMITS, Limits, read_limits
from serve_app.state.errors import AccountsError, Missing
from serve_app.state.store import revisions
from serve_app.state.store.callers import audit
from serve_app.state.store.database import Database
from serve_app.state.store.tables import accounts, keys, members

_ROOM = "accounts"
# What a key is made with, and what can be changed of it.
FIELDS = ("name", "scopes", "priority", "starts", "expires", "enabled", "limits", "member")


class KeyTable:
    """Every change bumps the revision of the accounts. Methods raise :class:`AccountsError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, account: str, *, by: Actor | None = None, **fields: Any) -> tuple[Key, str]:
        """A new key of an account that there is, and its value, which is kept nowhere. ``fields``: any of
        :data:`FIELDS`; ``limits`` as :func:`read_limits` takes them, ``member``: a member's id.
        """
        self.check(fields)
        with self._database.writing() as connection:
            made = self.insert(connection, account, fields, by)
            revisions.bump(self._database, connection, _ROOM)
        return made

    def change(self, account: str, key_id: str, *, by: Actor | None = None, **fields: Any) -> Key:
        """Changes what is given; None for ``starts`` and ``expires`` takes them away."""
        self.check(fields)
        with self._database.writing() as connection:
            before = self._find(connection, account, key_id)
            row = _columns(fields, before.limits)
            self._check_member(connection, account, row.get("member", ""))
            if row:
                connection.execute(sa.update(keys).where(keys.c.id == key_id).values(**row))
            after = self._find(connection, account, key_id)
            audit.record(connection, by or local_actor(), "update", "key", account, key_id, told(before), told(after))
            revisions.bump(self._database, connection, _ROOM)
        return after

    def roll(self, account: str, key_id: str, *, by: Actor | None = None) -> str:
        """Gives the key another value, which is returned; the one it had opens nothing from then on."""
        value = secrets.token_urlsafe(32)
        with self._database.writing() as connection:
            self._find(connection, account, key_id)
            connection.execute(sa.update(keys).where(keys.c.id == key_id).values(hash=hash_key(value)))
            audit.record(connection, by or local_actor(), "roll", "key", account, key_id)
            revisions.bump(self._database, connection, _ROOM)
        return value

    def remove(self, account: str, key_id: str, *, by: Actor | None = None) -> None:
        """The key opens nothing from then on. Raises :class:`Missing`."""
        with self._database.writing() as connection:
            before = self._find(connection, account, key_id)
            connection.execute(sa.delete(keys).where(keys.c.id == key_id))
            audit.record(connection, by or local_actor(), "delete", "key", account, key_id, told(before))
            revisions.bump(self._database, connection, _ROOM)

    def used(self, when: Mapping[str, float]) -> None:
        """When keys were last used, by id, in unix seconds; a later use that is known already stays."""
        rows = [{"key": name, "at": at} for name, at in sorted(when.items())]
        if not rows:
            return
        later = sa.or_(keys.c.used.is_(None), keys.c.used < sa.bindparam("at"))
        query = sa.update(keys).where(keys.c.id == sa.bindparam("key"), later).values(used=sa.bindparam("at"))
        with self._database.writing() as connection:
            connection.execute(query, rows)

    @staticmethod
    def check(fields: Mapping[str, Any]) -> None:
        """Raises :class:`AccountsError` for what no key can have."""
        if unknown := set(fields) - set(FIELDS):
            raise AccountsError(f"A key has no field {sorted(unknown)[0][:60]!r}. Fields: {', '.join(FIELDS)}.")
        _columns(fields, NO_LIMITS)

    def insert(
        self, connection: Connection, account: str, fields: Mapping[str, Any], by: Actor | None
    ) -> tuple[Key, str]:
        if connection.execute(sa.select(accounts).where(accounts.c.name == account)).first() is None:
            raise Missing(f"There is no account {account[:80]!r}. The list of accounts shows what there is.")
        value = secrets.token_urlsafe(32)
        hashed = hash_key(value)
        row = {"hash": hashed, "id": hashed[:ID_CHARS], "account": account, "created": now_text()}
        row |= _columns({"scopes": USUAL_SCOPES, "priority": "realtime", **fields}, NO_LIMITS)
        self._check_member(connection, account, row.get("member", ""))
        connection.execute(sa.insert(keys).values(**row))
        made = self._find(connection, account, row["id"])
        audit.record(connection, by or local_actor(), "create", "key", account, made.id, None, told(made))
        return made, value

    def _find(self, connection: Connection, account: str, key_id: str) -> Key:
        query = sa.select(keys).where(keys.c.account == account, keys.c.id == key_id).with_for_update()
        row = connection.execute(query).first()
        if row is None:
            raise Missing(f"Account {account[:80]} has no key {key_id[:80]!r}. The list of accounts has its keys.")
        return as_key(row)

    def _check_member(self, connection: Connection, account: str, member: str) -> None:
        query = sa.select(members.c.id).where(members.c.account == account, members.c.id == member)
        if member and connection.execute(query).first() is None:
            raise Missing(f"Account {account[:80]} has no member {member[:80]!r}.")


def _columns(fields: Mapping[str, Any], before: Limits) -> dict[str, Any]:
    """Checked, as the table has them."""
    row: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "scopes":
            row[name] = joined(check_scopes(value))
        elif name == "limits":
            row[name] = read_limits(value, before, of_key=True).stored()
        elif name == "priority":
            row[name] = check_priority(value)
        elif name == "name":
            row[name] = check_label(value)
        elif name in ("starts", "expires"):
            if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
                raise AccountsError(f"{name} is a time in unix seconds, not {str(value)[:40]!r}.")
            row[name] = value
        elif name == "enabled":
            row[name] = bool(value)
        else:
            if value and not re.fullmatch(r"[0-9a-f]{32}", str(value)):
                raise Missing(f"There is no member {str(value)[:40]!r}. The account lists those it has.")
            row[name] = value
    return row


def joined(scopes: Collection[Scope]) -> str:
    return ",".join(sorted_scopes(scopes))


def as_key(row: Any) -> Key:
    return Key(
        row.id,
        row.hash,
        row.priority,
        row.created,
        row.name,
        split(row.scopes),
        row.starts,
        row.expires,
        row.used,
        row.enabled,
        row.member,
        Limits.of_stored(row.limits),
    )


def split(scopes: str) -> frozenset[Scope]:
    """Scopes that only a newer program knows are left out."""
    return frozenset(sorted_scopes(scopes.split(",")))  # type: ignore[arg-type]


def told(key: Key) -> dict[str, Any]:
    """For the audit trail: all but the hash."""
    found = {name: getattr(key, name) for name in ("name", "priority", "starts", "expires", "enabled", "member")}
    return {**found, "scopes": sorted_scopes(key.scopes), "limits": key.limits.shown()}
