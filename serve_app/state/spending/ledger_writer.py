"""Entries of the ledger on their way: into a journal on disk before the client is told, and to the store behind it.

::

    event loop -> queue -> one thread -> journal (a group at a time) -> the loop: these are safe
                                     \\-> waiting -> the state's thread -> store -> journal emptied

A journal is a row of files of some :data:`SEGMENT_BYTES`. One whose entries are all in the store is emptied. While the
store is away files are let go unread, but for the newest: nothing but the disk holds what waits in them. They are found
again like the files of a process that has ended, by any gateway of the node. An entry is counted once by its id,
whoever sends it, and however often.

Streams under way are written down as they would be charged now, a few times a second (:mod:`.open_entries`): that
counts for those whose process was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from serve_app.api.errors import BooksClosed
from serve_app.state import insisting
from serve_app.state.errors import Away, StateError
from serve_app.state.journal import Journal
from serve_app.state.protocols import Row, Store
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.open_entries import OpenEntries

log = logging.getLogger("ray.serve")

SEGMENT_BYTES = 1 << 20
# Files that keep their entries in memory as well; an older one is let go.
MAX_SEGMENTS = 8
# What may wait on disk, of all gateways of the node.
MAX_BYTES = 4 << 30
GROUP = 1000
# How often a journal that could not be written is tried again, and how often files of others are looked for.
TRY_S = 1.0
ADOPT_S = 5.0
FINISH_S = 5.0
# How often streams under way are written down, and the share of the event loop's time that this may take.
OPEN_S = 0.25
OPEN_SHARE = 0.008
# Entries that no store takes, a JSON object in each line.
REFUSED = "refused.jsonl"
# Entries that wait in memory alone, where requests are served although nothing can be written.
MAX_UNWRITTEN = 100_000


@dataclass(slots=True)
class _Asked:
    """An entry that has just been made, and who waits until it is safe. ``shown``: the client has been shown what it
    charges for, so that it is charged even if it cannot be written now.
    """

    entry: Entry
    shown: bool
    loop: asyncio.AbstractEventLoop
    safe: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Segment:
    """One file of the journal. ``waiting``: its entries that the store does not have."""

    journal: Journal
    waiting: dict[str, Row] = field(default_factory=dict)


class LedgerWriter:
    """``folder``: journals of all gateways that share a state directory. :meth:`flush` and :meth:`adopt` are to be
    called again and again, by one other thread. ``give_away``: answer although nothing can be written. ``fsync``: an
    entry is safe when it outlives a loss of power, and not this process alone.
    """

    def __init__(self, store: Store, folder: Path, *, give_away: bool = False, fsync: bool = False) -> None:
        self._store = store
        self._folder = folder
        self._give_away = give_away
        self._fsync = fsync
        # Of this process alone, whatever number it has.
        self._name = f"{os.getpid()}-{os.urandom(4).hex()}"
        # A list of rows is what is under way.
        self._queue: SimpleQueue[_Asked | list[Row] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._finished = False
        # Guards the segments; never taken by an event loop.
        self._lock = threading.Lock()
        self._segments = [_Segment(Journal(folder, self._name, fsync=fsync))]
        self._open: dict[str, Callable[[], Entry | None]] = {}
        self._open_file = OpenEntries(folder, self._name)
        self._telling = False
        # What could be written nowhere yet, although clients have seen it.
        self._unwritten: list[Row] = []
        self._closed: str | None = None
        self._adopt_at = 0.0
        # Those that no store has taken, should they come again.
        self._refused: set[str] = set()
        self.written = 0
        self.lost = 0

    # -- for the event loop

    def check(self) -> None:
        """Raises `BooksClosed` while nothing can be written down: work that could not be charged is not begun."""
        if self._closed is not None and not self._give_away:
            raise BooksClosed

    def enter(self, entry: Entry, *, shown: bool = False) -> asyncio.Future[None]:
        """Has the entry written. The result is there when it outlives this process; raises `BooksClosed` where it can
        be written nowhere. Then it is forgotten, unless it was ``shown``.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(entry, shown, loop, loop.create_future())
        self._open.pop(entry.id, None)
        if self._finished:
            # An answer that ends while the gateway does.
            self._write([asked])
            return asked.safe
        self._queue.put(asked)
        if self._thread is None:
            self._begin()
        return asked.safe

    def open(self, entry_id: str, look: Callable[[], Entry | None]) -> None:
        """Has work written down as ``look()`` sees it, a few times a second until it is entered or forgotten, for who
        comes after a process that is killed. ``look()``: None where nothing is charged yet.
        """
        self._open[entry_id] = look
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(OPEN_S, self._tell_open)

    def forget(self, entry_id: str) -> None:
        """Nothing is charged for this work."""
        self._open.pop(entry_id, None)

    def _tell_open(self) -> None:
        began = time.perf_counter()
        self._telling = bool(self._open)
        if self._finished:
            return
        found = (look() for look in self._open.values())
        self._queue.put([entry.row() for entry in found if entry is not None])
        if self._thread is None:
            self._begin()
        if self._telling:
            pause = max(OPEN_S, (time.perf_counter() - began) / OPEN_SHARE)
            asyncio.get_running_loop().call_later(pause, self._tell_open)

    @property
    def problem(self) -> str | None:
        """Why nothing can be written at the moment."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Entries in memory that the store does not have."""
        return len(self._unwritten) + sum(len(segment.waiting) for segment in self._segments)

    @property
    def waiting_bytes(self) -> int:
        """What waits on disk, of all gateways of the node."""
        return sum(path.stat().st_size for path in self._folder.glob("*.journal"))

    # -- the thread that writes the journal

    def _begin(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        ends = False
        while not ends:
            group, under_way, ends = self._next()
            if group or self._closed is not None:
                self._write(group)
            if under_way is not None:
                # What was written before is less, and still right.
                with suppress(OSError):
                    self._open_file.write(under_way)

    def _next(self) -> tuple[list[_Asked], list[Row] | None, bool]:
        """What has come while the last group was written: entries, what is under way, and whether nothing follows."""
        group: list[_Asked] = []
        under_way: list[Row] | None = None
        with suppress(Empty):
            asked = self._queue.get(timeout=None if self._closed is None else TRY_S)
            while asked is not None:
                if isinstance(asked, list):
                    under_way = asked
                else:
                    group.append(asked)
                    if len(group) == GROUP:
                        return group, under_way, False
                asked = self._queue.get_nowait()
            return group, under_way, True
        return group, under_way, False

    def _write(self, group: list[_Asked]) -> None:
        rows = [*self._unwritten, *(asked.entry.row() for asked in group)]
        try:
            self._keep(rows)
        except Exception as error:
            self._refuse(group, error)
            return
        self._unwritten = []
        if self._closed is not None:
            log.warning("the ledger can be written again")
            self._closed = None
        _tell(group, None)

    def _keep(self, rows: list[Row]) -> None:
        """Into the journal, or where that cannot be written straight into the store."""
        with self._lock:
            segment = self._segments[-1]
            if segment.journal.bytes > SEGMENT_BYTES:
                segment = self._turn_over()
            try:
                if rows:
                    segment.journal.append(rows)
                else:
                    segment.journal.probe()
                segment.waiting.update((row.key[0], row) for row in rows)
                self.written += len(rows)
                return
            except OSError as error:
                problem = error
        if rows:
            try:
                self._store.write(rows)
                self.written += len(rows)
                return
            except (Away, StateError):
                pass
        raise problem

    def _turn_over(self) -> _Segment:
        """Begins a new file. With too many of them the oldest is let go, and read again later."""
        if len(self._segments) >= MAX_SEGMENTS:
            self._segments.pop(0).journal.close()
            if (held := self.waiting_bytes) > MAX_BYTES:
                raise OSError(f"{held} bytes of entries wait for the store")
        self._segments.append(_Segment(Journal(self._folder, self._name, fsync=self._fsync)))
        return self._segments[-1]

    def _refuse(self, group: list[_Asked], error: Exception) -> None:
        if self._closed is None:
            what = "requests go on without being safe" if self._give_away else "requests are refused"
            log.error("the ledger cannot be written (%s): %s", error, what)
        self._closed = str(error)
        kept = [asked.entry.row() for asked in group if asked.shown or self._give_away]
        self._unwritten += kept
        if (more := len(self._unwritten) - MAX_UNWRITTEN) > 0:
            self.lost += more
            del self._unwritten[:more]
        _tell(group, None if self._give_away else BooksClosed())

    # -- the state's thread

    def flush(self) -> None:
        """Brings what waits to the store, of very much only a part. Raises :class:`Away` and :class:`StateError`."""
        for segment in list(self._segments):
            while rows := self._some(segment):
                self._send(rows)
                with self._lock:
                    for row in rows:
                        segment.waiting.pop(row.key[0], None)
            with self._lock:
                if not segment.waiting and segment in self._segments:
                    segment.journal.clear()
                    if segment is not self._segments[-1]:
                        self._segments.remove(segment)
                        segment.journal.close()

    def _some(self, segment: _Segment) -> list[Row]:
        with self._lock:
            return list(islice(segment.waiting.values(), GROUP))

    def adopt(self) -> None:
        """Brings to the store one file of a process that has ended, or that was let go. Raises like :meth:`flush`."""
        now = time.monotonic()
        if now < self._adopt_at:
            return
        with self._segments[-1].journal.orphan() as rows:
            for at in range(0, len(rows), GROUP):
                self._send(rows[at : at + GROUP])
        if rows:
            log.info("took over %d entries of the ledger that another process could not bring to the store", len(rows))
        elif not self._adopt_open():
            self._adopt_at = now + ADOPT_S

    def _adopt_open(self) -> bool:
        """Charges for the streams of one process that was killed; whether there is more."""
        with self._open_file.orphan() as rows:
            for at in range(0, len(rows), GROUP):
                self._send(rows[at : at + GROUP])
        if rows:
            log.info("charged for %d streams of a process that was killed, as far as they were sent", len(rows))
        return bool(rows) or self._open_file.waits()

    def adopt_all(self) -> bool:
        """:meth:`adopt` until there is nothing more, within a bound; whether there is nothing more."""
        for _ in range(MAX_SEGMENTS):
            self._adopt_at = 0.0
            self.adopt()
            if self._adopt_at:
                return True
        return False

    def _send(self, rows: list[Row]) -> None:
        insisting.write(self._store, [row for row in rows if row.key[0] not in self._refused], self._refuse_row)

    def _refuse_row(self, row: Row, error: Exception) -> None:
        """One that no store takes is kept beside the journals, for an operator to look at."""
        self._refused.add(row.key[0])
        self.lost += 1
        path = self._folder / REFUSED
        try:
            _add_line(path, msgspec.json.encode(row.columns), fsync=self._fsync)
        except OSError:
            log.error("an entry of the ledger cannot be stored and is lost: %r", row.columns, exc_info=error)
        else:
            log.error("an entry of the ledger cannot be stored; it is kept in %s", path, exc_info=error)

    def finish(self) -> None:
        """Returns when all that was entered is in the journal, or after some seconds of a disk that does not answer."""
        self._finished = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(FINISH_S)

    def close(self) -> None:
        """What the store does not have stays in the journal, for the next process. So do streams that are broken off by
        the end of this one, and nobody may have them before it.
        """
        if not self._open:
            self._open_file.clear()
        with self._lock:
            for segment in self._segments:
                if not segment.waiting:
                    segment.journal.clear()
                segment.journal.close()


def _add_line(path: Path, line: bytes, *, fsync: bool) -> None:
    """All of it or nothing. Raises :class:`OSError`."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        if os.write(descriptor, line + b"\n") <= len(line):
            os.ftruncate(descriptor, before)
            raise OSError("the disk is full")
        if fsync:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _tell(group: Iterable[_Asked], error: Exception | None) -> None:
    """Wakes who waits, one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for asked in group:
        by_loop.setdefault(asked.loop, []).append(asked.safe)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, futures, error)
        except RuntimeError:  # the loop has ended: nobody waits any more
            continue


def _settle(futures: list[asyncio.Future[None]], error: Exception | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            # Who has left asks no more.
            future.exception()
