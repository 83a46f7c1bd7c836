"""Requests per minute, per account and task, counted in one SQLite file by all gateways of a node.

Windows are fixed minutes of the clock. Headers: `Ratelimit` and `Ratelimit-Policy` as Cloudflare's API sends them
(draft-ietf-httpapi-ratelimit-headers).
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from serve_app.api.errors import RateLimited
from serve_app.state.sqlite_file import open_shared

WINDOW_S = 60
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    account TEXT, task TEXT, window INTEGER, count INTEGER, PRIMARY KEY (account, task)
);
"""
# One statement counts and reads: gateways that do so at the same time each get a number of their own.
_COUNT = """
INSERT INTO requests VALUES (:account, :task, :window, 1)
ON CONFLICT (account, task) DO UPDATE SET
    count = CASE WHEN window = excluded.window THEN count + 1 ELSE 1 END, window = excluded.window
RETURNING count
"""


class RateLimiter:
    """``limits``: requests per minute by task; a task without an entry is not limited. ``clock`` gives unix seconds."""

    def __init__(self, path: Path, limits: Mapping[str, int], clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._limits = dict(limits)
        self._clock = clock
        self._db: sqlite3.Connection | None = None

    def take(self, account: str, task: str) -> dict[str, str]:
        """Counts one request and gives the headers that tell of it. Raises `RateLimited` for one too many."""
        quota = self._limits.get(task)
        if quota is None:
            return {}
        now = self._clock()
        window = int(now // WINDOW_S)
        row = {"account": account, "task": task, "window": window}
        count = self._open().execute(_COUNT, row).fetchone()[0]
        reset = math.ceil((window + 1) * WINDOW_S - now)
        headers = {
            "Ratelimit": f'"{task}";r={max(0, quota - count)};t={reset}',
            "Ratelimit-Policy": f'"{task}";q={quota};w={WINDOW_S}',
        }
        if count > quota:
            raise RateLimited(task, quota, reset, headers)
        return headers

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            # A minute's counts: not worth a wait for the disk.
            self._db = open_shared(self._path, _SCHEMA, durable=False)
            self._db.isolation_level = None
        return self._db
