"""An SQLite file: how its connections are made, and how its journal gets into it.

In all versions before 3.51.3 but 3.50.7 and 3.44.6 a checkpoint may lose what others commit at that moment, and damage
the file: https://www.sqlite.org/wal.html#walresetbug. The checkpoint has looked how far the journal goes; before it
copies, the journal is begun anew; so it notes as copied what it has not. Nobody can begin a journal anew who cannot
write, so a checkpoint here holds the lock of who writes, by a connection beside the one that copies, and SQLite makes
none by itself.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

log = logging.getLogger("ray.serve")

# How long others may hold the file.
TIMEOUT_S = 5.0
# From which length on the journal is copied into the file: SQLite's own thousand pages.
JOURNAL_BYTES = 1000 * 4096
# A copy that takes longer is told of: who writes waits for it.
SLOW_S = 1.0


def engine_of(url: sa.URL) -> Engine:
    """Makes the file where there is none, readable by its owner alone. Raises :class:`OSError`."""
    # Of a link that leads nowhere yet, what it names is made.
    path = Path(os.path.realpath(str(url.database)))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Made before SQLite would make it, since its journals take its mode. One that is there is left alone: to close it
    # would give up all locks that other connections of this process have on it.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    engine = sa.create_engine(url, connect_args={"timeout": TIMEOUT_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _: Any) -> None:
        # Transactions begin as we say, below, and not as the driver thinks.
        connection.isolation_level = None
        _enter_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later could not wait for another writer.
        options = connection.get_execution_options()
        write = options.get("write", True)
        if write:
            connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options.get('durable') else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def identity(url: sa.URL) -> tuple[int, int] | None:
    """The file itself, whatever its name; None where there is none."""
    try:
        found = os.stat(str(url.database))
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _enter_wal(connection: sqlite3.Connection) -> None:
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            # Entering WAL mode, and recovering it, needs the file alone, and SQLite does not wait for that by itself
            # however long its timeout: https://www.sqlite.org/wal.html#sometimes_queries_return_sqlite_busy_in_wal_mode
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.005)
    connection.execute("PRAGMA wal_autocheckpoint=0")
    # One that is begun anew is cut, so that its length says how much there is to copy.
    connection.execute("PRAGMA journal_size_limit=0")


class Checkpoints:
    """Copies the journal of the file ``path`` into it when it has become long. For any thread."""

    def __init__(self, path: str) -> None:
        # Where it is a link, the journal lies beside the file itself.
        self._path = os.path.realpath(path)
        self._lock = threading.Lock()
        # Who holds the lock of who writes, and who copies.
        self._pair: tuple[sqlite3.Connection, sqlite3.Connection] | None = None

    def after_commit(self) -> None:
        """Copies if it is time. What keeps it from that, another process that writes or a disk that is full, is met
        again after the next commit.
        """
        try:
            if os.stat(f"{self._path}-wal").st_size < JOURNAL_BYTES:
                return
        except OSError:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._copy()
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                    self._drop()
            finally:
                self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _copy(self) -> None:
        if self._pair is None:
            self._pair = (self._connect(), self._connect())
        writer, copier = self._pair
        writer.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        try:
            # It does not wait for who reads, and copies what is older than what they see.
            copier.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        finally:
            writer.execute("ROLLBACK")
        if (took := time.monotonic() - began) > SLOW_S:
            log.warning(
                "nobody could write to %s for %.1f s: its journal was copied; is the disk busy?", self._path, took
            )

    def _connect(self) -> sqlite3.Connection:
        # Nobody waits for what the next commit does as well.
        made = sqlite3.connect(
            f"{Path(self._path).absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=0.0,
            isolation_level=None,
            check_same_thread=False,
        )
        made.execute("PRAGMA synchronous=NORMAL")
        return made

    def _drop(self) -> None:
        pair, self._pair = self._pair, None
        for connection in pair or ():
            with suppress(sqlite3.Error):
                connection.close()
