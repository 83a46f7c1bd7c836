"""The store as gateways and the command line have it: all rooms over one database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from serve_app.state.protocols import Row, RowRoom
from serve_app.state.store import revisions
from serve_app.state.store.blobs.adapters import AdapterTable
from serve_app.state.store.blobs.uploads import UploadTable
from serve_app.state.store.callers.accounts import AccountTables
from serve_app.state.store.callers.attempts import AttemptTable
from serve_app.state.store.callers.sessions import SessionTable
from serve_app.state.store.database import Database
from serve_app.state.store.deferred.batches import BatchTables
from serve_app.state.store.deferred.events import EventTable
from serve_app.state.store.deferred.queues import QueueTables
from serve_app.state.store.deferred.reports import ReportTable
from serve_app.state.store.kept.answers import AnswerTable
from serve_app.state.store.kept.conversations import ConversationTable
from serve_app.state.store.kept.history import HistoryTable
from serve_app.state.store.kept.prompt_log import PromptTable
from serve_app.state.store.kept.responses import ResponseTable
from serve_app.state.store.kept.streams import StreamTable
from serve_app.state.store.kept.traces import TraceTable
from serve_app.state.store.migrate import upgrade
from serve_app.state.store.operated import OperatedTable
from serve_app.state.store.spending.alerts import AlertTable
from serve_app.state.store.spending.leases import LeaseTable
from serve_app.state.store.spending.ledger import LedgerTable
from serve_app.state.store.spending.usage import UsageTable
from serve_app.state.store.takeover import take_over


class SqlStore:
    """:class:`serve_app.state.protocols.Store`. The database is opened and brought to this program's schema when it
    is first used. ``durable``: every transaction outlives a loss of power.
    """

    def __init__(self, home: Path, url: str | None = None, *, durable: bool = False) -> None:
        self.database = Database(home, url, upgrade, durable=durable)
        self.adapters = AdapterTable(self.database)
        self.ledger = LedgerTable(self.database)
        self.queues = QueueTables(self.database, self.ledger)
        self.events = EventTable(self.database, self.queues)
        self.alerts = AlertTable(self.database, self.events)
        self.leases = LeaseTable(self.database, self.alerts)
        self.responses = ResponseTable(self.database)
        self.conversations = ConversationTable(self.database)
        self.traces = TraceTable(self.database)
        self.streams = StreamTable(self.database, self.ledger)
        self.answers = AnswerTable(self.database, self.ledger)
        self.batches = BatchTables(self.database, self.ledger, self.events)
        self.uploads = UploadTable(self.database)
        self.sessions = SessionTable(self.database)
        self.operated = OperatedTable(self.database)
        self.attempts = AttemptTable(self.database)
        self.reports = ReportTable(self.database)
        self.prompts = PromptTable(self.database)
        self.history = HistoryTable(self.database)
        self.usage = UsageTable(self.database)
        kept = (self.responses, self.conversations, self.traces, self.streams, self.answers, self.prompts, self.history)
        owned = (self.adapters, self.events, self.queues, self.batches, self.uploads, *kept)
        self.accounts = AccountTables(self.database, *(room.remove_account for room in owned))
        # What is written in groups: a kind of row, and who takes it.
        rooms: tuple[RowRoom, ...] = (self.responses, self.conversations, self.traces, self.ledger, self.prompts)
        self._rooms = {room.KIND: room for room in rooms}

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
