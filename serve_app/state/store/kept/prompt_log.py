"""Prompts and answers in the store."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Double, Index, LargeBinary, String, Table
from sqlalchemy.engine import Connection

from serve_app.state.callers.audit import Actor, local_actor
from serve_app.state.kept.prompt_log import EVERYBODY, KIND, MOST_BYTES, Prompt
from serve_app.state.store import revisions
from serve_app.state.store.callers import audit
from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# See `serve_app.state.kept.prompt_log.Prompt`. `body`: JSON, compressed to `bytes`.
prompts = Table(
    "prompts",
    metadata,
    Column("account", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("at", Double, nullable=False),
    Column("until", Double, nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("prompts_by_age", "account", "at"),
)
prompt_rules = Table(
    "prompt_rules",
    metadata,
    Column("account", String, primary_key=True),
    Column("days", Double, nullable=False),
)
_DAY_S = 86_400.0


class PromptTable:
    """:class:`serve_app.state.kept.prompt_log.PromptStore`. ``most_bytes`` of each account."""

    NAME = "prompts"
    KIND = KIND

    def __init__(self, database: Database, *, most_bytes: int = MOST_BYTES) -> None:
        self._database = database
        self._most = most_bytes
        # Since it was last looked whether there is too much.
        self._unseen = 0
        new = database.insert(prompts)
        changed = {name: new.excluded[name] for name in ("at", "until", "bytes", "body")}
        self._put = new.on_conflict_do_update(index_elements=["account", "id"], set_=changed)

    def rules(self) -> dict[str, float]:
        with self._database.reading() as connection:
            return _rules(connection)

    def keep(self, account: str, days: float, by: Actor | None = None, *, told: str = "") -> None:
        new = self._database.insert(prompt_rules).values(account=account, days=days)
        of_account = () if account == EVERYBODY else (prompts.c.account == account,)
        with self._database.writing() as connection:
            before = _rules(connection)
            connection.execute(new.on_conflict_do_update(index_elements=["account"], set_={"days": days}))
            if account == EVERYBODY:
                others = [name for name in before if name != EVERYBODY]
                of_account = (prompts.c.account.not_in(others),)
            connection.execute(sa.update(prompts).where(*of_account).values(until=prompts.c.at + days * _DAY_S))
            was = {"days": before.get(account)}
            audit.record(
                connection, by or local_actor(), "update", "prompts", told or account, account, was, {"days": days}
            )
            revisions.bump(self._database, connection, self.NAME)

    def forget(self, account: str, by: Actor | None = None, *, told: str = "") -> int:
        rule, kept = sa.delete(prompt_rules), sa.delete(prompts)
        if account != EVERYBODY:
            rule, kept = rule.where(prompt_rules.c.account == account), kept.where(prompts.c.account == account)
        with self._database.writing() as connection:
            before = _rules(connection)
            connection.execute(rule)
            gone = connection.execute(kept).rowcount
            was = {"days": before.get(account), "kept": gone or None}
            audit.record(connection, by or local_actor(), "delete", "prompts", told or account, account, was)
            revisions.bump(self._database, connection, self.NAME)
        return gone

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """What was kept, and that it is: another account may get the name."""
        connection.execute(sa.delete(prompt_rules).where(prompt_rules.c.account == account))
        connection.execute(sa.delete(prompts).where(prompts.c.account == account))
        revisions.bump(self._database, connection, self.NAME)

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Those whose account is still to be kept."""
        rules = _rules(connection)
        wanted = [row for row in rows if row["account"] in rules or EVERYBODY in rules]
        packed = [{**row, "body": (body := zlib.compress(row["body"])), "bytes": len(body)} for row in wanted]
        if not packed:
            return
        connection.execute(self._put, packed)
        self._unseen += sum(row["bytes"] for row in packed)
        if self._unseen > self._most // 16:
            self._unseen = 0
            self._shrink(connection)

    def find(self, account: str, request_id: str, now: float) -> Prompt | None:
        one = sa.select(prompts).where(prompts.c.account == account, prompts.c.id == request_id, prompts.c.until > now)
        with self._database.reading() as connection:
            row = connection.execute(one).first()
        return None if row is None else Prompt(row.at, row.until, zlib.decompress(row.body))

    def delete(self, account: str, request_id: str, by: Actor | None = None) -> bool:
        one = sa.delete(prompts).where(prompts.c.account == account, prompts.c.id == request_id)
        with self._database.writing() as connection:
            gone = bool(connection.execute(one).rowcount)
            if gone:
                audit.record(connection, by or local_actor(), "delete", "prompts", account, request_id)
        return gone

    def trim(self, now: float) -> None:
        with self._database.writing() as connection:
            connection.execute(sa.delete(prompts).where(prompts.c.until <= now))
            self._shrink(connection)

    def _shrink(self, connection: Connection) -> None:
        """Deletes the oldest of accounts that have too much."""
        newer = sa.func.sum(prompts.c.bytes).over(
            partition_by=prompts.c.account, order_by=(prompts.c.at.desc(), prompts.c.id)
        )
        large = sa.select(prompts.c.account).group_by(prompts.c.account)
        large = large.having(sa.func.sum(prompts.c.bytes) > self._most)
        for account in connection.scalars(large).all():
            summed = sa.select(prompts.c.id, newer.label("newer")).where(prompts.c.account == account).subquery()
            over = sa.select(summed.c.id).where(summed.c.newer > self._most)
            connection.execute(sa.delete(prompts).where(prompts.c.account == account, prompts.c.id.in_(over)))


def _rules(connection: Connection) -> dict[str, float]:
    return {row.account: row.days for row in connection.execute(sa.select(prompt_rules))}
