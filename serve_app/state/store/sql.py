"""The store as gateways and the command line have it: all rooms over one database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from serve_app.state.protocols import Row
from serve_app.state.store import revisions
from serve_app.state.store.database import Database
from serve_app.state.store.migrate import upgrade
from serve_app.state.store.rooms import Rooms
from serve_app.state.store.takeover import take_over


class SqlStore(Rooms):
    """:class:`serve_app.state.protocols.Store`. The database is opened and brought to this program's schema when it
    is first used. ``durable``: every transaction outlives a loss of power.
    """

    def __init__(self, home: Path, url: str | None = None, *, durable: bool = False) -> None:
        self.database = Database(home, url, upgrade, durable=durable)
        super().__init__(self.database)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self.database.name

    @property
    def away(self) -> str | None:
        return self.database.away

    @property
    def away_s(self) -> float:
        return self.database.away_s

    def open(self) -> None:
        """Opens the database, and takes over what an older program left in the state directory."""
        with self.database.reading():
            pass
        take_over(self.database.home, self)

    def write(self, rows: Sequence[Row]) -> None:
        """All of them or none."""
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_kind.setdefault(row.kind, []).append(row.columns)
        with self.database.writing() as connection:
            for kind, columns in by_kind.items():
                self._rooms[kind].write(connection, columns)

    def revisions(self) -> dict[str, int]:
        return revisions.current(self.database) | {"database": self.database.opened}

    def close(self) -> None:
        self.database.close()
