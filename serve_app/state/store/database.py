"""One database, SQLite or PostgreSQL: connections, transactions, and whether it can be reached."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from serve_app.state.errors import Away, Damaged, StateError
from serve_app.state.names import FILE
from serve_app.state.store.failures import REMEDIES, meaning
from serve_app.state.store.sqlite_file import Checkpoints, engine_of, identity

# How long a server may leave a message unanswered.
TIMEOUT_S = 5.0
# After how long of silence a server is asked whether it is still there.
PROBE_S = 3
SERVER_PROBES = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 3, "tcp_keepalives_count": 3}
# After how long the server ends a transaction in which nothing happens: a process that hangs, or whose machine is gone,
# would keep what it has locked for hours.
IDLE_S = 5.0
# How often a database that could not be reached is tried again; calls in between fail at once.
RETRY_S = 0.5


class Database:
    """``url``: ``postgresql+psycopg://...``, ``sqlite:///FILE``, or None for the file in ``home``.

    ``prepare`` is called once, before the first transaction; it raises :class:`StateError` for a wrong schema.
    ``durable``: all transactions are, see :meth:`writing`.
    """

    def __init__(
        self, home: Path, url: str | None, prepare: Callable[[Database], object], *, durable: bool = False
    ) -> None:
        self.home = home
        self.url = parse_url(url) if url else sa.URL.create("sqlite", database=str(home / FILE))
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._prepare = prepare
        self._durable = durable
        self._prepared = False
        self._preparing = threading.Lock()
        self._making = threading.Lock()
        self._engine: Engine | None = None
        self._checkpoints = Checkpoints(str(self.url.database)) if self.is_sqlite else None
        self._away_since: float | None = None
        self._reason = ""
        self._try_at = 0.0
        # Which file is open, and how many have been: an SQLite file can be removed or replaced while it is.
        self._file: tuple[int, int] | None = None
        self._gone = False
        # What is written into a damaged file makes it worse.
        self._damaged = False
        self.opened = 0

    @property
    def name(self) -> str:
        """For people; without the password."""
        return self.url.render_as_string(hide_password=True)

    @property
    def away(self) -> str | None:
        """Why the database cannot be reached; None: it was reached last time."""
        return None if self._away_since is None else self._reason

    @property
    def away_s(self) -> float:
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that changes nothing. Raises :class:`Away`."""
        with self._transaction(write=False) as connection:
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = False) -> Iterator[Connection]:
        """A transaction, committed at the end of the block. A machine that loses its power may lose the last ones of
        an SQLite file, but for those that are ``durable`` and what was before them. Raises :class:`Away`.
        """
        with self._transaction(write=True, durable=durable) as connection:
            yield connection

    @contextmanager
    def unprepared(self, *, write: bool = True, durable: bool = False) -> Iterator[Connection]:
        """A transaction on whatever schema there is; for migrations."""
        options = self.engine.execution_options(write=write, durable=durable or self._durable)
        with self._noting(), options.begin() as connection:
            yield connection
        if write and self._checkpoints is not None:
            self._checkpoints.after_commit()

    def insert(self, table: sa.Table) -> Any:
        """An insert that can say ``on_conflict_do_update`` and ``on_conflict_do_nothing``."""
        return insert_into(self.is_sqlite, table)

    def close(self) -> None:
        with self._making:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()
        if self._checkpoints is not None:
            self._checkpoints.close()

    @property
    def engine(self) -> Engine:
        with self._making:
            if self._engine is None:
                self._engine = engine_of(self.url) if self.is_sqlite else _postgresql(self.url)
                self._file = identity(self.url) if self.is_sqlite else None
                self.opened += 1
            return self._engine

    @contextmanager
    def _transaction(self, *, write: bool, durable: bool = False) -> Iterator[Connection]:
        now = time.monotonic()
        if self._away_since is not None:
            if now < self._try_at:
                raise Away(self._reason)
            self._try_at = now + RETRY_S
        if self._file is not None:
            with self._noting():
                self._follow_file()
            if self._damaged:
                raise Damaged(self._reason)
        if not self._prepared:
            with self._preparing, self._noting():
                if not self._prepared:
                    self._prepare(self)
                    self._prepared = True
        with self.unprepared(write=write, durable=durable) as connection:
            yield connection

    def _follow_file(self) -> None:
        """What is written into a file that was removed is lost. So one that is gone is waited for, and another in its
        place is opened.
        """
        found = identity(self.url)
        if found == self._file and not self._gone:
            return
        self.close()
        if found is None:
            if not self._gone:
                # Its journals would be applied to the file that takes its place.
                for suffix in ("-wal", "-shm"):
                    Path(f"{os.path.realpath(str(self.url.database))}{suffix}").unlink(missing_ok=True)
            self._gone = True
            raise FileNotFoundError("the file is gone; put it back, or start again with an empty one")
        self._gone = self._prepared = self._damaged = False

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Turns what the driver says of a database that cannot be used into :class:`Away`, and remembers it."""
        try:
            yield
        except (DBAPIError, PoolTimeout, OSError) as error:
            found = meaning(error)
            if found == "wrong":
                raise
            self._prepared = self._prepared and found != "foreign"
            self._damaged = self.is_sqlite and found == "damaged"
            self._lost(error, REMEDIES.get(found, ""))
            raise (Damaged if found in REMEDIES else Away)(self._reason) from error
        if not self._damaged:
            self._away_since = None

    def _lost(self, error: Exception, remedy: str) -> None:
        told = str(getattr(error, "orig", None) or error).strip().splitlines()
        self._reason = f"{self.name}: {told[0] if told else type(error).__name__}"
        if remedy:
            self._reason += f"; {remedy}"
        now = time.monotonic()
        self._try_at = now + RETRY_S
        if self._away_since is None:
            self._away_since = now


def parse_url(url: str) -> sa.URL:
    """Raises :class:`StateError` for what is neither SQLite nor PostgreSQL."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StateError("SERVE_APP_DATABASE is no URL. Use postgresql+psycopg://USER:PASSWORD@HOST/NAME.") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("postgresql+psycopg", "sqlite") or not parsed.database:
        raise StateError(
            f"SERVE_APP_DATABASE names {parsed.drivername}. Use postgresql+psycopg://USER:PASSWORD@HOST/NAME, or leave "
            "it out for a file in the state directory."
        )
    return parsed


def _postgresql(url: sa.URL) -> Engine:
    # Who waits for an answer sends nothing that could be left unacknowledged, hence the probes.
    probes = {"keepalives_idle": PROBE_S, "keepalives_interval": 1, "keepalives_count": int(TIMEOUT_S)}
    unacknowledged = {"tcp_user_timeout": int(TIMEOUT_S * 1000)}
    arguments = {"connect_timeout": 3, "application_name": "serve-app", **unacknowledged, **probes}
    engine = sa.create_engine(
        url,
        pool_size=4,
        max_overflow=4,
        pool_timeout=TIMEOUT_S,
        pool_pre_ping=True,
        connect_args={name: value for name, value in arguments.items() if name not in url.query},
    )

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        # The server's side of it, where the operator has no bounds of his own: what nobody goes on with ends, and
        # connections of machines that are gone do not use up all that it has.
        own = {"idle_in_transaction_session_timeout": int(IDLE_S * 1000), **SERVER_PROBES}
        connection.autocommit = True
        connection.execute(
            "SELECT set_config(name, value, false) FROM pg_settings "
            "JOIN unnest(%s::text[], %s::text[]) AS own(name, value) USING (name) WHERE source = 'default'",
            (list(own), [str(value) for value in own.values()]),
        )
        connection.autocommit = False

    return engine


def insert_into(is_sqlite: bool, table: sa.Table) -> Any:
    """See :meth:`Database.insert`."""
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)
