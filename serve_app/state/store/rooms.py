"""All rooms of the store over one database. Whoever imports this has every table declared."""

from __future__ import annotations

from serve_app.state.protocols import RowRoom
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
from serve_app.state.store.operated import OperatedTable
from serve_app.state.store.spending.alerts import AlertTable
from serve_app.state.store.spending.leases import LeaseTable
from serve_app.state.store.spending.ledger import LedgerTable
from serve_app.state.store.spending.usage import UsageTable


class Rooms:
    def __init__(self, database: Database) -> None:
        self.adapters = AdapterTable(database)
        self.ledger = LedgerTable(database)
        self.queues = QueueTables(database, self.ledger)
        self.events = EventTable(database, self.queues)
        self.alerts = AlertTable(database, self.events)
        self.leases = LeaseTable(database, self.alerts)
        self.responses = ResponseTable(database)
        self.conversations = ConversationTable(database)
        self.traces = TraceTable(database)
        self.streams = StreamTable(database, self.ledger)
        self.answers = AnswerTable(database, self.ledger)
        self.batches = BatchTables(database, self.ledger, self.events)
        self.uploads = UploadTable(database)
        self.sessions = SessionTable(database)
        self.operated = OperatedTable(database)
        self.attempts = AttemptTable(database)
        self.reports = ReportTable(database)
        self.prompts = PromptTable(database)
        self.history = HistoryTable(database)
        self.usage = UsageTable(database)
        kept = (self.responses, self.conversations, self.traces, self.streams, self.answers, self.prompts, self.history)
        owned = (self.adapters, self.events, self.queues, self.batches, self.uploads, *kept)
        self.accounts = AccountTables(database, *(room.remove_account for room in owned))
        # What is written in groups: a kind of row, and who takes it.
        rooms: tuple[RowRoom, ...] = (self.responses, self.conversations, self.traces, self.ledger, self.prompts)
        self._rooms = {room.KIND: room for room in rooms}
