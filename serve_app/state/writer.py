"""Rows on their way to the store: they wait in memory, and go there in groups from a thread of their own.

While the store is away they wait in a journal as well, and reach the store when it is back, each once by its key.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from serve_app.state import insisting
from serve_app.state.errors import Away, StateError
from serve_app.state.journal import Journal
from serve_app.state.protocols import Row, Store

log = logging.getLogger("ray.serve")

# What may wait. Beyond it the oldest rows are lost, and counted. The journal is written anew when it is twice as long.
MAX_WAITING_BYTES = 256 << 20
# Rows of one transaction, and transactions in a row.
GROUP = 1000
GROUPS = 8
# What a row takes beside its columns.
_OVERHEAD = 500


@dataclass(slots=True)
class _Waiting:
    row: Row
    # Done when the row is in the store, or in the journal.
    safe: Future[None] = field(default_factory=Future)

    def settle(self) -> None:
        if not self.safe.done():
            self.safe.set_result(None)


class GroupWriter:
    """``wake`` has :meth:`flush` called soon, by the one thread that calls it."""

    def __init__(self, store: Store, journal: Journal, wake: Callable[[], None]) -> None:
        self._store = store
        self._journal = journal
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, tuple[str, ...]], _Waiting] = {}
        # Those of the waiting that are not in the journal, and some that no longer wait.
        self._fresh: list[_Waiting] = []
        self._bytes = 0
        self.lost = 0

    def add(self, row: Row, *, soon: bool = False) -> Future[None]:
        """Takes a row, replacing one of its key that waits. The result is done when the row is safe. ``soon``: somebody
        waits for that.
        """
        waiting = _Waiting(row)
        with self._lock:
            before = self._waiting.pop((row.kind, row.key), None)
            self._waiting[row.kind, row.key] = waiting
            self._fresh.append(waiting)
            self._bytes += row.size + _OVERHEAD - (before.row.size + _OVERHEAD if before else 0)
            while self._bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
                self._drop_oldest()
        if before is not None:
            waiting.safe.add_done_callback(lambda _: before.settle())
        if soon:
            self._wake()
        return waiting.safe

    def find(self, kind: str, key: tuple[str, ...]) -> dict[str, Any] | None:
        """The columns of a row that waits."""
        waiting = self._waiting.get((kind, key))
        return None if waiting is None else waiting.row.columns

    def drop(self, kind: str, key: tuple[str, ...]) -> bool:
        """Forgets a row that waits, unless it is being written; whether there was one."""
        with self._lock:
            waiting = self._waiting.pop((kind, key), None)
            if waiting is None:
                return False
            self._bytes -= waiting.row.size + _OVERHEAD
        waiting.settle()
        return True

    @property
    def rows(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def journal_bytes(self) -> int:
        return self._journal.bytes

    def flush(self) -> None:
        """Brings what waits to the store, or where it is away to the journal; of very much only a part, so that whoever
        calls can do other things. Raises :class:`Away`.
        """
        for _ in range(GROUPS):
            with self._lock:
                group = list(islice(self._waiting.values(), GROUP))
            if not group:
                break
            try:
                self._write(group)
            except (Away, StateError):
                self._keep()
                raise
            self._done(group)
        with self._lock:
            self._fresh = [waiting for waiting in self._fresh if not waiting.safe.done()]
            nothing = not self._waiting
        if nothing:
            self._journal.clear()

    def adopt(self) -> None:
        """Brings to the store what processes left in journals that have ended. Raises :class:`Away`."""
        while True:
            with self._journal.orphan() as rows:
                if not rows:
                    return
                last = {(row.kind, row.key): row for row in rows}
                self._write([_Waiting(row) for row in last.values()])
                log.info("took over %d rows that another process could not write", len(last))

    def close(self) -> None:
        """What waits stays in the journal, for the next process."""
        self._keep()
        self._journal.close()

    def _write(self, group: list[_Waiting]) -> None:
        insisting.write(self._store, [waiting.row for waiting in group], self._refused)

    def _refused(self, row: Row, error: Exception) -> None:
        log.error("a %s cannot be written and is lost", row.kind, exc_info=error)
        self.lost += 1

    def _done(self, group: list[_Waiting]) -> None:
        with self._lock:
            for waiting in group:
                key = (waiting.row.kind, waiting.row.key)
                if self._waiting.get(key) is waiting:
                    del self._waiting[key]
                    self._bytes -= waiting.row.size + _OVERHEAD
        for waiting in group:
            waiting.settle()

    def _keep(self) -> None:
        with self._lock:
            fresh, self._fresh = [waiting for waiting in self._fresh if not waiting.safe.done()], []
        # What was replaced or dropped meanwhile still takes room in the file: write it anew before it grows for ever.
        if self._journal.bytes > 2 * MAX_WAITING_BYTES:
            self._journal.clear()
            with self._lock:
                fresh = list(self._waiting.values())
        try:
            if fresh:
                self._journal.append(waiting.row for waiting in fresh)
        except OSError as error:
            log.error("the journal cannot be written (%s): %d rows wait in memory only", error, len(fresh))
            with self._lock:
                self._fresh = fresh + self._fresh
            return
        for waiting in fresh:
            waiting.settle()

    def _drop_oldest(self) -> None:
        key = next(iter(self._waiting))
        waiting = self._waiting.pop(key)
        self._bytes -= waiting.row.size + _OVERHEAD
        if not self.lost:
            log.error("more than %d bytes wait for the store: the oldest are lost", MAX_WAITING_BYTES)
        self.lost += 1
        waiting.settle()
