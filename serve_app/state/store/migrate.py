"""The schema's version, brought to this program's before anything else is done with a database.

An empty database gets the tables as they are declared, others the migrations that they lack: both lead to the same.
Programs that start at the same time do it one after another, under a lock: PostgreSQL's advisory one, or a file beside
SQLite's. Alembic is imported only where there is something to migrate.

A newer program writes down which older ones can use its schema. These go on beside it while an upgrade replaces
processes one by one, and can be started again after it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state import migrations
from serve_app.state.errors import StateError
from serve_app.state.migrations import HEAD, SERVES
from serve_app.state.store.database import Database
from serve_app.state.store.tables import ledger_closed, metadata, schema_programs

log = logging.getLogger("ray.serve")

_VERSION_TABLE = "alembic_version"
# Any number that nobody else locks in the same database.
_LOCK = 0x5E7EA99
_FOLDER = Path(migrations.__file__).parent


def version(database: Database) -> str | None:
    """The schema's version; None: an empty database."""
    with database.unprepared(write=False) as connection:
        return _version(connection)


def upgrade(database: Database) -> bool:
    """Makes the tables or brings them up to date; whether there was anything to do. Raises :class:`StateError` for a
    schema of a newer program that this one cannot use. What a newer one has made stays as it is.
    """
    if _usable(database):
        return False
    with locked(database):
        if _usable(database):
            return False
        found = version(database)
        if found is None:
            with database.unprepared() as connection:
                _make(connection)
            return True
        config = _config()
        if found not in _known(config):
            raise StateError(
                f"{database.name} has schema {found}, which is newer than this program's {HEAD}. Start the newer "
                "program again, or restore the backup that was made before its upgrade."
            )
        with database.unprepared() as connection:
            _run(config, connection)
    return True


def _usable(database: Database) -> bool:
    """Whether the schema is this program's, or a newer one that says so."""
    with database.unprepared(write=False) as connection:
        found = _version(connection)
        if found == HEAD:
            return True
        if found is None or not sa.inspect(connection).has_table(schema_programs.name):
            return False
        usable = HEAD in connection.execute(sa.select(schema_programs.c.version)).scalars().all()
    if usable:
        log.info("%s has schema %s of a newer program; this one knows %s and can use it", database.name, found, HEAD)
    return usable


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """One program at a time, among all that use the database."""
    if database.is_sqlite:
        file = Path(str(database.url.database))
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file.with_name(f".{file.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
        return
    # A connection of its own, outside of any transaction: the lock ends with it, whatever happens to us.
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.select(sa.func.pg_advisory_lock(_LOCK)))
        try:
            yield
        finally:
            connection.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK)))


def _make(connection: Connection) -> None:
    """All tables, as the newest migration leaves them in a database that was empty before the first."""
    statements = _declared(connection.dialect.name)
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "postgresql":
        # Some hundred ways to the server and back are one.
        driver.execute(";\n".join(statements))
    else:
        for statement in statements:
            driver.execute(statement)
    connection.execute(sa.insert(ledger_closed).values(until=int(time.time() // 86_400)))
    connection.execute(sa.text(f"INSERT INTO {_VERSION_TABLE} (version_num) VALUES (:head)"), {"head": HEAD})
    _write_programs(connection)


@cache
def _declared(dialect: str) -> tuple[str, ...]:
    """The statements that make all tables and their indexes."""
    from serve_app.state.store import rooms  # noqa: F401 - they declare the tables

    found: list[str] = []

    def tell(statement: Any, *_: object, **__: object) -> None:
        found.append(str(statement.compile(dialect=engine.dialect)))

    driver = "+psycopg" if dialect == "postgresql" else ""
    engine: Any = sa.create_mock_engine(f"{dialect}{driver}://", tell)
    metadata.create_all(engine, checkfirst=False)
    sa.Table(
        _VERSION_TABLE,
        sa.MetaData(),
        sa.Column("version_num", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("version_num", name=f"{_VERSION_TABLE}_pkc"),
    ).create(engine, checkfirst=False)
    return tuple(found)


def _version(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table(_VERSION_TABLE):
        return None
    return connection.execute(sa.text(f"SELECT version_num FROM {_VERSION_TABLE}")).scalar_one_or_none()


def _config() -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.attributes["metadata"] = metadata
    return config


def _known(config: Any) -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def _run(config: Any, connection: Connection) -> None:
    from alembic import command

    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    _write_programs(connection)


def _write_programs(connection: Connection) -> None:
    connection.execute(sa.delete(schema_programs))
    connection.execute(sa.insert(schema_programs), [{"version": version} for version in (HEAD, *SERVES)])
