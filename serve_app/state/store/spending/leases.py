"""Leases of limits, in the store: which part of each limit which gateway may use.

Whatever a gateway lets in is covered by its lease, and stays so until the ledger has its entry. The leases of one limit
are changed by one gateway at a time, which first reads what the others have and then what the ledger has: an entry that
arrives in between is counted twice for a moment, and never not at all. So spent and leased together never exceed a
budget.

A gateway that dies leaves its leases. Once the ledger has the entries of its journal, whoever brought them there calls
:meth:`LeaseTable.forget`, and what was leased and not spent is there again. Where nobody can (its disk is lost), a
lease counts for as long as entries of its gateway could belong to the window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.spending.quotas import STREAMS, Granted, Quota, Want
from serve_app.state.store.database import Database
from serve_app.state.store.spending import spent
from serve_app.state.store.spending.alerts import AlertTable
from serve_app.state.store.tables import lease_owners, leases

# Streams of a gateway that has been silent for so long are gone.
STREAMS_S = 15.0
# Silent gateways whose leases can matter to no window are forgotten.
_FORGET_S = 40 * 86400.0
_GROUP = 200
_CHANGING = ("window", "amount", "held", "asked")


class LeaseTable:
    """``away_s``: for how long gateways go on without the store."""

    def __init__(self, database: Database, alerts: AlertTable) -> None:
        self._database = database
        self._alerts = alerts
        self.away_s = 3600.0
        new = database.insert(leases)
        changed = {name: new.excluded[name] for name in _CHANGING}
        self._put = new.on_conflict_do_update(index_elements=["account", "key", "kind", "owner"], set_=changed)
        beat = database.insert(lease_owners)
        self._beat = beat.on_conflict_do_update(index_elements=["owner"], set_={"beat": beat.excluded.beat})

    def lease(self, owner: str, now: float, wants: Sequence[Want]) -> dict[Quota, Granted]:
        """Sets the leases of ``owner`` to what it wants, as far as there is so much. Twice is the same as once."""
        wants = sorted(wants, key=lambda want: want.quota)
        with self._database.writing() as connection:
            self._lock(connection, [want.quota for want in wants])
            held = self._held(connection, [want.quota for want in wants])
            written = spent.written(connection, [entry for want in wants for entry in want.owed])
            used = spent.since_each(connection, {want.quota: want.window for want in wants if want.quota.is_budget})
            found: dict[Quota, Granted] = {}
            rows, gone = [], []
            for want in wants:
                known = held.get(want.quota, [])
                mine = next((one for one in known if one.owner == owner), None)
                granted = self._grant(owner, now, want, known, written, used.get(want.quota, 0))
                found[want.quota] = granted
                row = {**want.quota._asdict(), "owner": owner, "window": want.window, "amount": granted.amount}
                asked = max(0, want.asked - sum(want.owed[entry] for entry in granted.written))
                row |= {"held": min(want.held, granted.amount), "asked": min(asked, want.limit)}
                if granted.amount or row["asked"]:
                    if mine is None or any(getattr(mine, name) != row[name] for name in _CHANGING):
                        rows.append(row)
                elif mine is not None:
                    gone.append(want.quota)
            if rows:
                connection.execute(self._put, rows)
            for group in _groups(gone):
                connection.execute(sa.delete(leases).where(leases.c.owner == owner, _among(group)))
            connection.execute(self._beat, {"owner": owner, "beat": now})
            self._alerts.notice(connection, now, [(want, found[want.quota].spent) for want in wants])
        return found

    def forget(self, owner: str) -> None:
        """What ``owner``, which has ended, had leased is there again. The ledger has all its entries."""
        with self._database.writing() as connection:
            connection.execute(sa.delete(leases).where(leases.c.owner == owner))
            connection.execute(sa.delete(lease_owners).where(lease_owners.c.owner == owner))

    def trim(self, now: float) -> None:
        """Forgets gateways that have been silent for longer than any window is."""
        silent = sa.select(lease_owners.c.owner).where(lease_owners.c.beat < now - _FORGET_S - self.away_s)
        with self._database.writing() as connection:
            connection.execute(sa.delete(leases).where(leases.c.owner.in_(silent)))
            connection.execute(sa.delete(lease_owners).where(lease_owners.c.owner.in_(silent)))

    def _grant(
        self, owner: str, now: float, want: Want, held: Sequence[sa.Row], written: set[str], used: int
    ) -> Granted:
        quota = want.quota
        mine, others, others_held, contended = 0, 0, 0, False
        for row in held:
            if row.owner == owner:
                mine = row.amount if row.window == want.window or not quota.is_rate else 0
            elif self._counts(row, want, now):
                others += row.amount
                others_held += row.held
                contended |= row.asked > row.amount
        here = frozenset(entry for entry in want.owed if entry in written)
        known = sum(want.owed[entry] for entry in here)
        # What the gateway was never told, because an answer was lost, is neither its lease nor taken off it twice.
        mine, asked = max(0, min(mine, want.amount - known)), max(0, want.asked - known)
        amount = max(min(mine, asked), min(asked, want.limit - used - others))
        return Granted(max(0, amount), others, others_held, contended, used, here)

    def _counts(self, row: sa.Row, want: Want, now: float) -> bool:
        """Whether another's lease is one of this window."""
        if want.quota.is_rate:
            return bool(row.window == want.window)
        beat = 0.0 if row.beat is None else row.beat
        if want.quota.kind == STREAMS:
            return bool(beat > now - STREAMS_S)
        # It may have worked until then without the store, and its entries be on their way.
        return bool(beat + self.away_s + 60 >= want.window)

    def _held(self, connection: Connection, quotas: Sequence[Quota]) -> dict[Quota, list[sa.Row]]:
        found: dict[Quota, list[sa.Row]] = {}
        joined = leases.outerjoin(lease_owners, leases.c.owner == lease_owners.c.owner)
        for group in _groups(quotas):
            query = sa.select(leases, lease_owners.c.beat).select_from(joined).where(_among(group))
            for row in connection.execute(query):
                found.setdefault(Quota(row.account, row.key, row.kind), []).append(row)
        return found

    def _lock(self, connection: Connection, quotas: Sequence[Quota]) -> None:
        """One gateway at a time for each limit; in SQLite whoever writes is alone already."""
        if self._database.is_sqlite or not quotas:
            return
        # In one order, so that gateways wait for each other and not in a circle.
        numbers = sorted({_number(quota) for quota in quotas})
        query = sa.text("SELECT pg_advisory_xact_lock(n) FROM unnest(CAST(:numbers AS bigint[])) AS n")
        connection.execute(query, {"numbers": numbers})


def _groups(quotas: Sequence[Quota]) -> Iterator[Sequence[Quota]]:
    return (quotas[start : start + _GROUP] for start in range(0, len(quotas), _GROUP))


def _among(quotas: Iterable[Quota]) -> sa.ColumnElement[bool]:
    return sa.tuple_(leases.c.account, leases.c.key, leases.c.kind).in_([tuple(quota) for quota in quotas])


def _number(quota: Quota) -> int:
    """For a lock of PostgreSQL's."""
    digest = hashlib.blake2b("\0".join(quota).encode(), digest_size=8, person=b"lease").digest()
    return int.from_bytes(digest, "big", signed=True)
