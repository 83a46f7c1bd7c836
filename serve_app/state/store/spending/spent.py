"""What the ledger says of budgets: which work it knows, and what an account or key has spent since a moment."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.spending.quotas import DAY_S, NEURONS, Quota
from serve_app.state.store.tables import ledger, ledger_days

_GROUP = 500


def written(connection: Connection, entries: Sequence[str]) -> set[str]:
    """Those of ``entries`` (ids) that the ledger has."""
    found: set[str] = set()
    for start in range(0, len(entries), _GROUP):
        query = sa.select(ledger.c.id).where(ledger.c.id.in_(entries[start : start + _GROUP]))
        found.update(connection.scalars(query))
    return found


def since(connection: Connection, quota: Quota, begin: int) -> int:
    """Micro-neurons, or nano-units of its currency, that are spent of a budget since ``begin``, a midnight in unix
    seconds.
    """
    column = ledger_days.c.neurons if quota.kind == NEURONS else ledger_days.c.money
    query = sa.select(sa.func.coalesce(sa.func.sum(column), 0))
    query = query.where(ledger_days.c.account == quota.account, ledger_days.c.day >= begin // DAY_S)
    if quota.currency:
        query = query.where(ledger_days.c.currency == quota.currency)
    if quota.key:
        query = query.where(ledger_days.c.key == quota.key)
    # PostgreSQL adds whole numbers up to a decimal.
    return int(connection.scalar(query) or 0)
