"""What an operator has said of models by hand, in the store."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Boolean, Column, String, Table, Text

from serve_app.catalog.operated import Operated
from serve_app.state.callers.audit import Action, Actor, local_actor
from serve_app.state.operated import of_row
from serve_app.state.store import revisions
from serve_app.state.store.callers import audit
from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# See `serve_app.catalog.operated.Operated`. `bounds`, `canary`: JSON.
operated = Table(
    "operated_models",
    metadata,
    Column("model", String, primary_key=True),
    Column("record", Text, nullable=False),
    Column("running", Boolean),
    Column("bounds", String, nullable=False),
    Column("canary", String),
)


class OperatedTable:
    """:class:`serve_app.state.operated.OperatedStore`."""

    NAME = "operated"

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, Operated]:
        with self._database.reading() as connection:
            return {row.model: of_row(*row) for row in connection.execute(sa.select(operated))}

    def put(self, account: str, found: Operated, by: Actor | None = None) -> None:
        row = {"record": found.record, "running": found.running, "bounds": json.dumps(found.bounds)}
        row["canary"] = None if found.canary is None else json.dumps(asdict(found.canary))
        new = self._database.insert(operated).values(model=found.model, **row)
        with self._database.writing() as connection:
            one = sa.select(operated).where(operated.c.model == found.model).with_for_update()
            before = connection.execute(one).first()
            connection.execute(new.on_conflict_do_update(index_elements=["model"], set_=row))
            was = {} if before is None else _shown(of_row(*before))
            action: Action = "create" if before is None else "update"
            audit.record(connection, by or local_actor(), action, "model", account, found.model, was, _shown(found))
            revisions.bump(self._database, connection, self.NAME)

    def forget(self, account: str, model: str, by: Actor | None = None) -> None:
        with self._database.writing() as connection:
            before = connection.execute(sa.select(operated).where(operated.c.model == model).with_for_update()).first()
            if before is None:
                return
            connection.execute(sa.delete(operated).where(operated.c.model == model))
            was = _shown(of_row(*before))
            audit.record(connection, by or local_actor(), "delete", "model", account, model, was, {})
            revisions.bump(self._database, connection, self.NAME)


def _shown(found: Operated) -> dict[str, Any]:
    replicas = {stage: list(bounds) for stage, bounds in found.bounds.items()}
    canary = None if found.canary is None else asdict(found.canary)
    return {"record": found.record or None, "running": found.running, "replicas": replicas, "canary": canary}
