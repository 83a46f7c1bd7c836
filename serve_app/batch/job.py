"""One request of a batch as whoever runs it gets it, and what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Request
from serve_app.state.spending.ledger import Entry


@dataclass(slots=True, frozen=True)
class Job:
    """``created``: of the batch, in unix seconds. ``tries``: how often it has been tried before; ``faults``: how often
    it may itself have been why that failed. ``model``: what it asks for, "" where that is not known. ``alone``: a
    message, for which nothing was looked up when it was sent.
    """

    batch: str
    request: Request
    caller: Caller
    created: float
    tries: int = 0
    faults: int = 0
    model: str = ""
    alone: bool = False

    @property
    def request_id(self) -> str:
        """32 hex digits, the same whoever runs it: so it is counted once."""
        return hashlib.sha256(f"{self.batch}.{self.request.number}".encode()).hexdigest()[:32]


@dataclass(slots=True, frozen=True)
class Done:
    """An answer or an error as HTTP has it. ``entries``: what is charged, not yet written anywhere. ``retry_after``:
    seconds after which it may go better, None where the same would come of it. ``at_fault``: the request itself may be
    why it failed (workers were lost over it), so that it is not tried for ever.
    """

    status: int
    body: bytes
    entries: list[Entry] = field(default_factory=list)
    retry_after: float | None = None
    at_fault: bool = False


# Runs one request in the words of its dialect. Raises nothing; a cancelled call ends the request wherever it is.
Perform = Callable[[Job], Awaitable[Done]]
