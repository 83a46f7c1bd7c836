"""What the ledger says of budgets: which work it knows, and what an account or key has spent since a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.spending.quotas import DAY_S, NEURONS, Quota
from serve_app.state.store.tables import ledger, ledger_days

_GROUP = 500
# Of what each statement asks for at most: the oldest SQLite takes 999 values, and a key is three of them.
_BUDGETS = 200


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


def since_each(connection: Connection, begins: Mapping[Quota, int]) -> dict[Quota, int]:
    """:func:`since` of many budgets, in a statement for all of one kind: gateways ask four times a second for all that
    have been used lately, and hold up the others' leases meanwhile.
    """
    groups: dict[tuple[bool, bool, int], list[Quota]] = {}
    for quota, begin in begins.items():
        groups.setdefault((quota.kind == NEURONS, bool(quota.key), begin), []).append(quota)
    found: dict[Quota, int] = {}
    for (neurons, keyed, begin), quotas in groups.items():
        for start in range(0, len(quotas), _BUDGETS):
            some = quotas[start : start + _BUDGETS]
            sums = _sums(connection, {(quota.account, quota.key) for quota in some}, neurons, keyed, begin)
            found |= {quota: _of(sums.get((quota.account, quota.key), {}), quota.currency) for quota in some}
    return found


def _sums(
    connection: Connection, owners: Iterable[tuple[str, str]], neurons: bool, keyed: bool, begin: int
) -> dict[tuple[str, str], dict[str, int]]:
    """By account and key ("" unless ``keyed``) and currency."""
    days = ledger_days.c
    key = days.key if keyed else sa.literal("")
    by = (days.account, key, days.currency) if keyed else (days.account, days.currency)
    query = sa.select(days.account, key, days.currency, sa.func.sum(days.neurons if neurons else days.money))
    # The account alone has an index.
    query = query.where(days.account.in_(sorted({account for account, _ in owners})))
    if keyed:
        query = query.where(sa.tuple_(days.account, days.key).in_(sorted(owners)))
    found: dict[tuple[str, str], dict[str, int]] = {}
    for account, of, currency, spent in connection.execute(query.where(days.day >= begin // DAY_S).group_by(*by)):
        found.setdefault((account, of), {})[currency] = int(spent)
    return found


def _of(sums: Mapping[str, int], currency: str) -> int:
    return sums.get(currency, 0) if currency else sum(sums.values())
