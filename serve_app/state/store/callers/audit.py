"""The audit trail, in the store."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.callers.audit import Action, Actor, Change, Kind
from serve_app.state.store.database import Database
from serve_app.state.store.tables import audit

MOST = 1000
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def record(
    connection: Connection,
    by: Actor,
    action: Action,
    kind: Kind,
    account: str,
    target: str,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Adds an entry within the transaction that changes something. ``before``, ``after``: fields as JSON has them."""
    old, new = before or {}, after or {}
    pairs = {name: [old.get(name), new.get(name)] for name in {**old, **new}}
    # Nothing that becomes an empty text or list is no change.
    changes = {
        name: pair for name, pair in pairs.items() if pair[0] != pair[1] and any(one not in _EMPTY for one in pair)
    }
    row = {"id": uuid.uuid4().hex, "at": time.time(), "account": account, "actor": by.who, "via": by.via}
    row |= {"request": by.request, "action": action, "kind": kind, "target": target}
    connection.execute(sa.insert(audit).values(**row, changes=json.dumps(changes)))


class AuditTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    def read(
        self,
        account: str | None = None,
        *,
        since: float | None = None,
        before: float | None = None,
        after: str = "",
        limit: int = 100,
        oldest_first: bool = False,
    ) -> list[Change]:
        """Entries from ``since`` up to ``before`` (unix seconds), newest first; of all accounts for None.
        ``after``: the id of the entry that they follow, the last one of the page before.
        """
        at, name = audit.c.at, audit.c.id
        query = sa.select(audit).limit(min(limit, MOST))
        query = query.order_by(at, name) if oldest_first else query.order_by(at.desc(), name.desc())
        if account is not None:
            query = query.where(audit.c.account == account)
        if since is not None:
            query = query.where(at >= since)
        if before is not None:
            query = query.where(at < before)
        if after:
            place = sa.tuple_(sa.select(at).where(name == after).scalar_subquery(), sa.literal(after))
            here = sa.tuple_(at, name)
            query = query.where(here > place if oldest_first else here < place)
        with self._database.reading() as connection:
            return [_change(row) for row in connection.execute(query)]


def _change(row: Any) -> Change:
    by = Actor(row.actor, row.via, row.request)
    changes = {name: (old, new) for name, (old, new) in json.loads(row.changes).items()}
    return Change(row.id, row.at, row.account, by, row.action, row.kind, row.target, changes)
