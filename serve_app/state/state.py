"""Everything that gateways share, as one of them sees it: memory that answers at once, and a thread that keeps it and
the store together.

Nothing here makes an event loop wait. What is decided for every request (whose key, which limit) is decided from
memory; what is written goes to the store in groups; what a client asks for by name is looked up on other threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from serve_app.state.background import Background
from serve_app.state.blobs.adapter_book import AdapterBook
from serve_app.state.blobs.files import Files, open_files
from serve_app.state.callers.attempts import WINDOW_S, Attempts
from serve_app.state.callers.book import AccountBook
from serve_app.state.callers.limits import Plan
from serve_app.state.callers.sessions import SessionBook
from serve_app.state.deferred.sweep import Sweep
from serve_app.state.errors import Away, StateError
from serve_app.state.journal import Journal
from serve_app.state.kept.conversations import Conversations
from serve_app.state.kept.prompt_log import PromptLog
from serve_app.state.kept.responses import Responses
from serve_app.state.kept.traces import Traces
from serve_app.state.operated import OperatedBook
from serve_app.state.owners import Owner
from serve_app.state.protocols import Store
from serve_app.state.reader import ReadPool
from serve_app.state.spending.allowance import Allowance
from serve_app.state.spending.ledger_writer import LedgerWriter
from serve_app.state.spending.usage_reader import UsageReader
from serve_app.state.store.sql import SqlStore
from serve_app.state.writer import GroupWriter

log = logging.getLogger("ray.serve")

# How often the store is asked what has changed, and traces are written: a change is known everywhere within a second.
POLL_S = 0.25
# The least time between two exchanges: what comes in between goes together.
GROUP_S = 0.02
# How often journals of processes that have ended are looked for.
ADOPT_S = 5.0
# How often entries of the ledger that are old enough are dropped.
TRIM_S = 60.0
# For how long of that time days are closed and batches forgotten, one after another, where there are many.
TRIMMING_S = 0.2
# How long an ending gateway tries to bring to the store what waits.
CLOSE_S = 2.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class State:
    """``home``: the state directory. ``database``, ``files``, ``ledger_days``: see
    :class:`serve_app.config.Settings`; ``give_away``, ``fsync``: see :class:`LedgerWriter`. ``account`` and
    ``key_hashes`` are those of the settings.

    The thread begins with :meth:`start`, or with the first request that leaves something to tell.
    """

    def __init__(
        self,
        home: Path,
        account: str,
        key_hashes: tuple[str, ...],
        *,
        database: str | None = None,
        files: str | None = None,
        rate_limits: Mapping[str, int] = MappingProxyType({}),
        plan: Plan = "paid",
        away_s: float = 3600.0,
        alert_shares: tuple[int, ...] = (50, 80, 100),
        ledger_days: float = 90.0,
        give_away: bool = False,
        fsync: bool = False,
    ) -> None:
        self._store: Store = SqlStore(home, database, durable=fsync)
        self._background = Background("state", self._turn, poll_s=POLL_S, group_s=GROUP_S)
        self._closed = False
        self._reader = ReadPool()
        self._writer = GroupWriter(self._store, Journal(home / "journal"), self._wake)
        self._revisions: dict[str, int] | None = None
        self._adopted_at = self._trimmed_at = float("-inf")
        self._ledger_days = ledger_days
        self._filling = threading.Lock()
        self._trouble: str | None = None
        self._files: Files | None = None
        self._files_at = files or str(home / "files")
        self.accounts = AccountBook(account, key_hashes)
        # What is asked of the store itself about accounts, by :meth:`look` and :meth:`change`.
        self.admin = self._store.accounts
        self._owner = Owner(home / "gateways")
        self.allowance = Allowance(
            self._store.leases,
            self._owner,
            by_task=rate_limits,
            plan=plan,
            away=lambda: self._store.away_s,
            away_s=away_s,
            drained=lambda: not self.ledger.waiting and not self.ledger.waiting_bytes,
        )
        self._store.alerts.shares = alert_shares
        # Asked by :meth:`look`.
        self.history = self._store.history
        self.events = self._store.events
        self.queues = self._store.queues
        self.responses = Responses(self._store.responses, self._writer, self._reader)
        self.ledger = LedgerWriter(self._store, home / "ledger", give_away=give_away, fsync=fsync)
        self.conversations = Conversations(self._store.conversations, self._writer, self._reader)
        self.streams = self._store.streams
        self.answers = self._store.answers
        self.batches = self._store.batches
        self.uploads = self._store.uploads
        self.adapters = AdapterBook(self._store.adapters, self._reader)
        self.sessions = SessionBook(self._store.sessions, self._reader)
        self.operated = OperatedBook(self._store.operated)
        self.attempts = Attempts(self._store.attempts, self._reader)
        self.reports = self._store.reports
        self.prompts = PromptLog(self._store.prompts, self._writer, self._reader)
        self._sweep = Sweep(self.batches, self.uploads, lambda: self.files)
        self.traces = Traces(self._store.traces, self._writer, self._reader)
        # Whoever sums up years keeps no other look-up waiting.
        self._usage_reader = ReadPool(threads=2)
        self._store.usage.entries_kept_s = ledger_days * 86_400
        self.usage = UsageReader(self._store.usage, self._usage_reader)

    @property
    def files(self) -> Files:
        """Where blobs lie."""
        if self._files is None:
            self._files = open_files(self._files_at)
        return self._files

    async def start(self) -> None:
        """Opens the store and reads what requests need. Does not wait for a store that is away: what is known without
        it, the key of the settings, is served. Raises :class:`StateError` for one that this program must not use.
        """
        self.accounts.blind = True
        # However long another program takes to bring the schema up to date.
        await asyncio.to_thread(self._first)
        self._background.begin()

    async def look(self, look: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Asks the store, off the event loop. Raises `StoreAway`."""
        return await self._reader.run(look, *args, **kwargs)

    async def change(self, change: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Changes accounts, keys or members. This gateway goes by it when it returns, the others within a second.
        Raises `StoreAway`.
        """

        def changed() -> _T:
            done = change(*args, **kwargs)
            # What is done is done: where the store has gone meanwhile, it is read when it is back.
            with suppress(Away):
                self._fill()
            return done

        return await self._reader.run(changed)

    def close(self) -> None:
        """Writes what waits; what the store does not take stays in the journal. Blocks for two seconds at most. Once is
        enough.
        """
        if self._closed:
            return
        self._closed = True
        self.ledger.finish()
        self._background.end(CLOSE_S)
        self.allowance.close()
        self.ledger.close()
        self._writer.close()
        self._reader.close()
        self._usage_reader.close()
        self._store.close()

    def health(self) -> dict[str, Any]:
        """For ``GET /health``: whether the store can be reached, for how long it could not, and how many entries of the
        ledger wait for it; whether nothing can be written at all; and whether files could not be had.
        """
        away = self._store.away
        if away is None and self._trouble is None:
            told: dict[str, Any] = {"status": "ready"}
        else:
            told = {"status": "away", "seconds": round(self._store.away_s, 1), "entries": self.ledger.waiting}
        told |= {"ledger": "closed"} if self.ledger.problem is not None else {}
        return told | ({"files": "away"} if self._files is not None and self._files.problem else {})

    def counters(self) -> dict[str, Any]:
        """For the operator."""
        found = {**self.health(), "name": self._store.name, "waiting": self._writer.rows, "lost": self._writer.lost}
        found |= {"waiting_bytes": self._writer.bytes, "journal_bytes": self._writer.journal_bytes}
        ledger = self.ledger
        found["ledger"] = {"written": ledger.written, "waiting": ledger.waiting, "lost": ledger.lost}
        found["ledger"]["waiting_bytes"] = ledger.waiting_bytes
        files = self._files.problem if self._files is not None else None
        problem = ledger.problem or self._trouble or self._store.away or files
        return found | ({"problem": problem} if problem else {})

    def _wake(self) -> None:
        self._background.wake()
        self._background.begin()

    def _first(self) -> None:
        try:
            self._store.open()
            self._look()
        except Away as away:
            log.warning("the store is away (%s): serving what needs none", away)

    def _turn(self, poll: bool, last: bool) -> None:
        before = self._store.away
        try:
            if poll:
                self.traces.show_long()
            self._writer.flush()
            if poll:
                self._look()
                self.ledger.flush()
                self._adopt()
                self._tell_uses(all=last)
                self._trim()
            self._trouble = None
        except Away as away:
            if before is None:
                log.warning("the store is away (%s): what is written waits", away)
            return
        except Exception as error:
            # Whatever it is, the next turn may do better, and requests go on meanwhile.
            told = str(error) if isinstance(error, StateError) else type(error).__name__
            if told != self._trouble:
                log.error("the state cannot be kept together with the store: %s", told, exc_info=error)
            self._trouble = told
        if before is not None and self._store.away is None:
            log.warning("the store is back")

    def _look(self) -> None:
        """Reads again what has changed."""
        if self._revisions is None:
            self._store.open()
        found = self._store.revisions()
        # Another database has revisions of its own.

        def changed(room: str) -> bool:
            names = (room, "database")
            return self._revisions is None or any(self._revisions.get(name) != found.get(name) for name in names)

        if changed(self._store.accounts.NAME):
            # The revision was read first: a change in between is read twice, and never missed.
            self._fill()
        if changed(self._store.adapters.NAME):
            self.adapters.forget()
        if changed(self._store.sessions.NAME):
            self.sessions.fill(time.time())
        if changed(self._store.operated.NAME):
            self.operated.fill()
        if changed(self._store.prompts.NAME):
            self.prompts.fill()
        self._revisions = found

    def _fill(self) -> None:
        """Reads the accounts again; who reads later also fills later."""
        with self._filling:
            self.accounts.fill(self._store.accounts.all())
            self.accounts.blind = False

    def _tell_uses(self, *, all: bool = False) -> None:
        """When keys and sessions were last used."""
        if used := self.accounts.untold(all=all):
            self._store.accounts.keys.used(used)
            self.accounts.told(used)
        self.sessions.tell()

    def _adopt(self) -> None:
        now = time.monotonic()
        if now - self._adopted_at > ADOPT_S:
            self._adopted_at = now
            with self._owner.ended() as ended:
                self._writer.adopt()
                # What they had leased comes back when the ledger has all that they spent.
                if ended and self.ledger.adopt_all():
                    for owner in ended:
                        self._store.leases.forget(owner)
                        self._owner.forget(owner)
        self.ledger.adopt()

    def _trim(self) -> None:
        now = time.monotonic()
        if now - self._trimmed_at > TRIM_S:
            self._trimmed_at = now
            wall = time.time()
            self._store.ledger.trim(wall - self._ledger_days * 86_400)
            self._store.leases.trim(wall)
            self._store.alerts.trim(wall)
            self._store.events.trim(wall)
            self._store.sessions.trim(wall)
            self._store.history.trim(wall)
            self._store.prompts.trim(wall)
            self._store.attempts.trim(wall - WINDOW_S)
            self._store.reports.trim(wall)
            self._store.queues.trim(wall)
            while self._store.ledger.close_days(wall) and time.monotonic() - now < TRIMMING_S:
                pass
            self._sweep.turn(wall, now + TRIMMING_S)
            self._store.adapters.sweep(wall, lambda digest: self.files.delete_below(f"adapters/{digest}"))
