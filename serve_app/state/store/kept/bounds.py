"""How much of a table an account keeps: a number of rows, their size, and a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import sqlalchemy as sa
from sqlalchemy.engine import Connection

# Looking at every row of an account is worth it now and then only: each bound is soft by this many writes.
TRIM_EVERY = 32


@dataclass(frozen=True, slots=True)
class Keep:
    """Of each account: ``max_count`` rows, ``max_bytes`` of them, each for ``max_age_s`` seconds."""

    max_age_s: float = 30 * 86400.0
    max_count: int = 10_000
    max_bytes: int = 256 << 20


USUAL = Keep()


class Bounds:
    """Keeps a table within them; rows go whose ``moment`` is the longest ago. The table has the columns ``id``,
    ``account`` and ``size``.
    """

    def __init__(self, table: sa.Table, moment: sa.Column[float], keep: Keep) -> None:
        self._keep = keep
        self._written: dict[str, int] = {}
        self._old = sa.delete(table).where(moment <= sa.bindparam("since"))
        self._beyond = _beyond(table, moment.name, keep)

    @property
    def since(self) -> float:
        """Rows of that moment and before have gone."""
        return time.time() - self._keep.max_age_s

    def written(self, connection: Connection, account: str) -> None:
        """The account has one row more."""
        count = self._written.get(account, 0)
        self._written[account] = count + 1
        if count % TRIM_EVERY == 0:
            connection.execute(self._old, {"since": self.since})
            connection.execute(self._beyond, {"of": account})


@cache
def _beyond(table: sa.Table, moment: str, keep: Keep) -> sa.Delete:
    """Removes what goes beyond the number or the size, counted from the newest."""
    newest = (table.c[moment].desc(), table.c.id.desc())
    counted = (
        sa.select(
            table.c.id,
            sa.func.row_number().over(order_by=newest).label("number"),
            sa.func.sum(table.c.size).over(order_by=newest).label("total"),
        )
        .where(table.c.account == sa.bindparam("of"))
        .subquery()
    )
    beyond = (counted.c.number > keep.max_count) | (counted.c.total > keep.max_bytes)
    return sa.delete(table).where(table.c.id.in_(sa.select(counted.c.id).where(beyond)))
