"""Members of accounts, in the store."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.accounts import Member, Scope, check_email, check_scopes, now_text, sorted_scopes
from serve_app.state.callers.audit import Actor, local_actor
from serve_app.state.errors import Missing, Taken
from serve_app.state.store import revisions
from serve_app.state.store.callers import audit
from serve_app.state.store.database import Database
from serve_app.state.store.tables import accounts, keys, members


class MemberTable:
    """Every change bumps the revision of the accounts. Methods raise :class:`AccountsError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, account: str, email: str, scopes: Iterable[Scope], *, by: Actor | None = None) -> Member:
        """Raises :class:`Taken` where the address is a member's already."""
        made = Member(uuid.uuid4().hex, check_email(email), check_scopes(scopes), now_text())
        row = {"id": made.id, "account": account, "email": made.email, "created": made.created}
        new = self._database.insert(members).values(**row, scopes=_joined(made.scopes))
        with self._database.writing() as connection:
            if connection.execute(sa.select(accounts).where(accounts.c.name == account)).first() is None:
                raise Missing(f"There is no account {account[:80]!r}. The list of accounts shows what there is.")
            if connection.execute(new.on_conflict_do_nothing().returning(members.c.id)).first() is None:
                raise Taken(f"{email[:80]} is a member of account {account} already. Change that member.")
            audit.record(connection, by or local_actor(), "create", "member", account, made.id, None, _told(made))
            revisions.bump(self._database, connection, "accounts")
        return made

    def change(self, account: str, member_id: str, scopes: Iterable[Scope], *, by: Actor | None = None) -> Member:
        """What the member's keys may do at most."""
        checked = check_scopes(scopes)
        with self._database.writing() as connection:
            before = self._find(connection, account, member_id)
            after = Member(before.id, before.email, checked, before.created)
            connection.execute(sa.update(members).where(members.c.id == member_id).values(scopes=_joined(checked)))
            was, now = _told(before), _told(after)
            audit.record(connection, by or local_actor(), "update", "member", account, member_id, was, now)
            revisions.bump(self._database, connection, "accounts")
        return after

    def remove(self, account: str, member_id: str, *, by: Actor | None = None) -> None:
        """Ends the membership and all of the member's keys."""
        with self._database.writing() as connection:
            before = self._find(connection, account, member_id)
            own = (keys.c.account == account) & (keys.c.member == member_id)
            gone = sorted(connection.scalars(sa.select(keys.c.id).where(own)))
            connection.execute(sa.delete(keys).where(own))
            connection.execute(sa.delete(members).where(members.c.id == member_id))
            was = {**_told(before), "keys": gone}
            audit.record(connection, by or local_actor(), "delete", "member", account, member_id, was)
            revisions.bump(self._database, connection, "accounts")

    def _find(self, connection: Connection, account: str, member_id: str) -> Member:
        query = sa.select(members).where(members.c.account == account, members.c.id == member_id).with_for_update()
        row = connection.execute(query).first()
        if row is None:
            raise Missing(f"Account {account[:80]} has no member {member_id[:80]!r}.")
        return as_member(row)


def as_member(row: Any) -> Member:
    return Member(row.id, row.email, frozenset(sorted_scopes(row.scopes.split(","))), row.created)


def _joined(scopes: Iterable[Scope]) -> str:
    return ",".join(sorted_scopes(scopes))


def _told(member: Member) -> dict[str, Any]:
    return {"email": member.email, "scopes": sorted_scopes(member.scopes)}
