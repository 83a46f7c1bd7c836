"""Requests per minute, account and task, summed over all gateways."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from serve_app.state.store.database import Database
from serve_app.state.store.tables import rate_counts


class RateTable:
    def __init__(self, database: Database) -> None:
        self._database = database
        new = database.insert(rate_counts)
        same = rate_counts.c.minute == new.excluded.minute
        later = rate_counts.c.minute < new.excluded.minute
        # A gateway whose clock is behind neither counts in a minute that is over elsewhere nor begins it again.
        count = sa.case(
            (same, rate_counts.c.count + new.excluded.count), (later, new.excluded.count), else_=rate_counts.c.count
        )
        minute = sa.case((later, new.excluded.minute), else_=rate_counts.c.minute)
        self._add = new.on_conflict_do_update(
            index_elements=["account", "task"], set_={"count": count, "minute": minute}
        ).returning(rate_counts)

    def add(self, minute: int, counts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], tuple[int, int]]:
        """Adds requests by account and task; returns, for these, the latest minute and its count over all gateways."""
        # In one order, so that gateways that do so at the same time wait for each other and not in a circle.
        rows = [
            {"account": account, "task": task, "minute": minute, "count": count}
            for (account, task), count in sorted(counts.items())
        ]
        if not rows:
            return {}
        with self._database.writing() as connection:
            return {
                (account, task): (latest, count) for account, task, latest, count in connection.execute(self._add, rows)
            }
