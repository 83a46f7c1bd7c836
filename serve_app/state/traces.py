"""The path each request took: what happened when, with token counts, for whoever sent it.

Paths are written when a request ends, many at a time, into an SQLite file that every gateway of the node shares; one
under way is known to its own gateway only, which others ask for it. A look-up names the account, and what belongs to
another is looked up in the same way as what was never there.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import orjson

from serve_app.api.errors import NotFound
from serve_app.state.peers import Peers
from serve_app.state.sqlite_file import open_shared

# Events of one request: a bound for those that lose many workers or generate many choices.
MAX_EVENTS = 64
FLUSH_S = 0.25
_SCHEMA = """
CREATE TABLE IF NOT EXISTS paths (
    account TEXT NOT NULL, id TEXT NOT NULL, ended REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (account, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS paths_by_age ON paths (ended);
"""
_TRIM = "DELETE FROM paths WHERE ended <= (SELECT ended FROM paths ORDER BY ended DESC LIMIT 1 OFFSET ?)"


class Path:
    """One request under way: events with milliseconds since its arrival."""

    def __init__(
        self, request_id: str = "", account: str = "", model: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.id = request_id
        self.account = account
        # A request may be several generations; and calls may have something to tell after the last token.
        self.generations = 0
        self.users = 0
        self._clock = clock
        self._began = clock()
        self._body: dict[str, Any] = {"id": request_id, "model": model, "created": round(time.time(), 3)}
        self._body |= {"status": "running", "events": []}

    def event(self, name: str, **facts: Any) -> None:
        """Something happened now. Facts that are None are left out."""
        if len(self._body["events"]) < MAX_EVENTS:
            at = round((self._clock() - self._began) * 1e3, 2)
            self._body["events"].append({"event": name, "ms": at, **{k: v for k, v in facts.items() if v is not None}})

    def end(self, status: str, **facts: Any) -> None:
        """``status``: "done", "refused", "failed" or "left" (its client went)."""
        self.event(status, **facts)
        self._body["status"] = status

    def packed(self) -> bytes:
        return orjson.dumps(self._body)


class PathStore:
    """``max_count`` paths of all accounts are kept, the newest; those under way are bounded by what is in flight."""

    def __init__(self, file: File, *, max_count: int = 20_000) -> None:
        self._file = file
        self._max_count = max_count
        self._running: dict[tuple[str, str], Path] = {}
        self._ended: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._flushes = 0

    def begin(self, request_id: str, account: str, model: str) -> Path:
        """The path of a request, which several generations may share. Without an id it is not kept."""
        path = self._running.get((account, request_id)) or Path(request_id, account, model)
        path.generations += 1
        path.users += 1
        if request_id:
            self._running[(account, request_id)] = path
        return path

    def end(self, path: Path, status: str, **facts: Any) -> None:
        """A generation has ended; with the last one the request has."""
        path.generations -= 1
        if path.generations > 0:
            path.event(status, **facts)
        else:
            path.end(status, **facts)
        self.release(path)

    def release(self, path: Path) -> None:
        """One user less; with the last one the path is complete, and can be looked up for a while."""
        path.users -= 1
        if path.users > 0:
            return
        key = (path.account, path.id)
        if self._running.pop(key, None) is None:
            return
        self._ended[key] = (time.time(), path.packed())
        # A disk that does not keep up costs paths, not memory.
        while len(self._ended) > self._max_count:
            self._ended.popitem(last=False)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.ensure_future(self._flush_soon())

    async def get(self, account: str, request_id: str, peers: Peers) -> dict[str, Any]:
        """The path as JSON has it, from here or another gateway. Raises :class:`NotFound`, in the same words and time
        for any id but an own one.
        """
        found = await self.find(account, request_id)
        if found is None:
            found = next(iter(await peers.have("path", account, request_id)), None)
        if found is None:
            raise NotFound("No such request. The header cf-ray of an answer holds its id.", param="id")
        return found

    async def find(self, account: str, request_id: str) -> dict[str, Any] | None:
        """What this gateway and the file of its node have of it."""
        stored = await asyncio.to_thread(self._read, account, request_id)
        running = self._running.get((account, request_id))
        if running is not None:
            return orjson.loads(running.packed())
        ended = self._ended.get((account, request_id))
        if ended is not None:
            return orjson.loads(ended[1])
        return orjson.loads(stored) if stored is not None else None

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_S)
        batch = dict(self._ended)
        if batch:
            await asyncio.to_thread(self._write, batch)
            for key, value in batch.items():
                if self._ended.get(key) is value:
                    del self._ended[key]

    def _write(self, batch: dict[tuple[str, str], tuple[float, bytes]]) -> None:
        rows = [(account, request_id, ended, body) for (account, request_id), (ended, body) in batch.items()]
        with self._lock, self._open() as db:
            db.executemany("INSERT OR REPLACE INTO paths VALUES (?, ?, ?, ?)", rows)
            if self._flushes % 32 == 0:
                db.execute(_TRIM, (self._max_count,))
            self._flushes += 1

    def _read(self, account: str, request_id: str) -> bytes | None:
        with self._lock:
            query = "SELECT body FROM paths WHERE account = ? AND id = ?"
            row = self._open().execute(query, (account, request_id)).fetchone()
        return row[0] if row else None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            # Worth a look for some hours, and not worth a wait for the disk.
            self._db = open_shared(self._file, _SCHEMA, durable=False)
        return self._db
