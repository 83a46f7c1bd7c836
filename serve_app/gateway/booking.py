"""How a gateway settles: counters hear of it, and an entry of the ledger is safe before the client is told of the end.

Most entries go to the gateway's journal. The entry of a stream that can be resumed goes to the store with the stream's
end, and that of an answer with an `Idempotency-Key` with the answer, in one transaction each: several gateways may run
such a request, and one of them ends it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial

from serve_app.gateway.resume.log import current
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.ledger_writer import LedgerWriter
from serve_app.tasks.work import Settled, Settlement

# Entries of the answer at hand that are kept with it; None: they are written at once.
kept_with_answer: ContextVar[list[Entry] | None] = ContextVar("kept_with_answer", default=None)


class Booking:
    """:attr:`serve_app.tasks.work.Runtime.book` of a gateway."""

    def __init__(self, settlement: Settlement, ledger: LedgerWriter) -> None:
        self._settlement = settlement
        self._ledger = ledger

    def keep(self, entry_id: str, look: Callable[[], Entry | None]) -> None:
        """:attr:`serve_app.tasks.work.Runtime.keep`; a stream that resumes is settled by the gateway that ends it."""
        if current.get() is None:
            self._ledger.open(entry_id, look)

    def __call__(self, settled: Settled) -> Awaitable[None] | None:
        """The result, if there is one, is there when the entry is safe. Raises `BooksClosed` where it cannot be."""
        entry, stream = settled.entry, current.get()
        if entry is None:
            self._ledger.forget(settled.entry_id)
        if stream is not None:
            if entry is not None:
                stream.entries.append(entry.row().columns)
            stream.settlements.append(partial(self._settlement.tell, settled))
            return None
        self._settlement.tell(settled)
        if entry is None:
            return None
        if (kept := kept_with_answer.get()) is not None:
            kept.append(entry)
            return None
        return self._ledger.enter(entry, shown=settled.shown)
