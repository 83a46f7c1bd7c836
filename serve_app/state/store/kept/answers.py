"""Whole answers by the key that their client gave them, so that a request sent twice is done once."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.kept.streams import KeyClaim, Known
from serve_app.state.protocols import Row
from serve_app.state.store.callers.removed import removed_at
from serve_app.state.store.database import Database
from serve_app.state.store.kept.streams import living
from serve_app.state.store.spending.ledger import LedgerTable
from serve_app.state.store.tables import answers, stream_owners

# What goes beyond an account's number or size, counted from the newest; what is under way stays.
_TRIM = sa.text("""
DELETE FROM answers WHERE answer IS NOT NULL AND (account, key) IN (
    SELECT account, key FROM (
        SELECT account, key, row_number() OVER newest AS number, sum(size) OVER newest AS total
        FROM answers WHERE account = :account WINDOW newest AS (ORDER BY created DESC, key DESC)
    ) AS counted WHERE number > :count OR total > :bytes
)
""")


class AnswerTable:
    """Keeps ``max_count`` answers and ``max_bytes`` of them per account, each for ``max_age_s`` seconds."""

    TRIM_EVERY = 32

    def __init__(
        self,
        database: Database,
        ledger: LedgerTable,
        *,
        max_age_s: float = 86_400.0,
        max_count: int = 10_000,
        max_bytes: int = 64 << 20,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._max_age_s = max_age_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._claims = 0

    def claim(self, claim: KeyClaim, until: float, print: str) -> Known | None:
        """None: the key is the caller's, a gateway that lives at least ``until``; otherwise who was first. A key whose
        gateway is gone without an answer is free.
        """
        own = (answers.c.account == claim.account) & (answers.c.key == claim.key)
        stale = answers.c.answer.is_(None) & answers.c.owner.not_in(living(claim.at))
        lives = self._database.insert(stream_owners).values(owner=claim.owner, until=until)
        row = {"account": claim.account, "key": claim.key, "created": claim.at, "owner": claim.owner}
        row |= {"print": print, "size": len(claim.key)}
        with self._database.writing() as connection:
            connection.execute(lives.on_conflict_do_update(index_elements=["owner"], set_={"until": until}))
            if self._claims % self.TRIM_EVERY == 0:
                bounds = {"count": self._max_count, "bytes": self._max_bytes}
                connection.execute(_TRIM, {"account": claim.account, **bounds})
            self._claims += 1
            old = answers.c.created <= claim.at - self._max_age_s
            connection.execute(sa.delete(answers).where(own & (stale | old)))
            put = self._database.insert(answers).values(**row).on_conflict_do_nothing().returning(answers.c.key)
            if connection.execute(put).first() is not None:
                return None
            found = connection.execute(sa.select(answers.c.print, answers.c.answer).where(own)).one_or_none()
        # Whoever was first has just given up.
        return Known(print, None) if found is None else Known(found.print, found.answer)

    def keep(self, claim: KeyClaim, answer: bytes, entries: Sequence[Row] = ()) -> bool:
        """The answer to the request that claimed the key, and what it costs, in one transaction: so a key is charged
        once. False: the claim is another's, and nothing was written. Where its account was removed meanwhile, the
        answer goes with it, and what it costs is charged.
        """
        kept = sa.update(answers).where(_of(claim)).values(answer=answer, size=len(answer) + len(claim.key))
        with self._database.writing() as connection:
            if not connection.execute(kept).rowcount and not _removed_since(connection, claim):
                return False
            if entries:
                self._ledger.write(connection, [row.columns for row in entries])
        return True

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """Keys of what is under way go too: see :meth:`keep`."""
        connection.execute(sa.delete(answers).where(answers.c.account == account))

    def free(self, claim: KeyClaim) -> None:
        """There is no answer that could be given again."""
        with self._database.writing() as connection:
            connection.execute(sa.delete(answers).where(_of(claim) & answers.c.answer.is_(None)))


def _of(claim: KeyClaim) -> sa.ColumnElement[bool]:
    key = (answers.c.account == claim.account) & (answers.c.key == claim.key)
    return key & (answers.c.owner == claim.owner) & (answers.c.created == claim.at)


def _removed_since(connection: Connection, claim: KeyClaim) -> bool:
    """Whether its account has been removed since the claim."""
    return removed_at(connection, (claim.account,)).get(claim.account, float("-inf")) >= claim.at
