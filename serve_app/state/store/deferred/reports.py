"""What runners of batches do at this moment, for the gateways, which no call leads to them without starting one."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Column, Double, LargeBinary, String, Table

from serve_app.state.deferred.reports import KEPT_S, Report
from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# See `serve_app.state.deferred.reports.Report`.
reports = Table(
    "runner_reports",
    metadata,
    Column("runner", String, primary_key=True),
    Column("at", Double, nullable=False),
    Column("live", LargeBinary, nullable=False),
    Column("counted", LargeBinary, nullable=False),
)


class ReportTable:
    """:class:`serve_app.state.deferred.reports.ReportStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, report: Report) -> None:
        row = {"at": report.at, "live": report.live, "counted": report.counted}
        new = self._database.insert(reports).values(runner=report.runner, **row)
        with self._database.writing() as connection:
            connection.execute(new.on_conflict_do_update(index_elements=["runner"], set_=row))

    def since(self, at: float) -> list[Report]:
        newest = sa.select(reports).where(reports.c.at >= at).order_by(reports.c.runner)
        with self._database.reading() as connection:
            return [Report(row.runner, row.at, row.live, row.counted) for row in connection.execute(newest)]

    def trim(self, now: float) -> None:
        with self._database.writing() as connection:
            connection.execute(sa.delete(reports).where(reports.c.at < now - KEPT_S))
