"""Opening an SQLite file that several processes share."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

TIMEOUT_S = 5.0


def open_shared(path: Path, schema: str, durable: bool) -> sqlite3.Connection:
    """A connection in WAL mode to a file that only its owner can read, made with `schema` if it was not there.

    ``durable``: whether a commit survives the loss of power (`synchronous=NORMAL` in WAL mode: it survives the death
    of the process either way). Raises `sqlite3.OperationalError` when others hold the file for longer than `TIMEOUT_S`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Made before SQLite would make it, so that nobody else on the machine can read it.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path, timeout=TIMEOUT_S, check_same_thread=False)
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            # Entering WAL mode, and recovering it, needs the file alone, and SQLite does not wait for that by itself
            # however long its timeout: https://www.sqlite.org/wal.html#sometimes_queries_return_sqlite_busy_in_wal_mode
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA synchronous={'NORMAL' if durable else 'OFF'}")
            db.executescript(schema)
            return db
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                db.close()
                raise
            time.sleep(0.005)
