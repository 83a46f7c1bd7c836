"""A copy of the whole store in one file, taken while servers run."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from serve_app.state.errors import Away, StateError
from serve_app.state.store.database import Database

# Where distributions that have several versions of PostgreSQL put its programs.
_DEBIAN = Path("/usr/lib/postgresql")


def back_up(database: Database, target: Path) -> None:
    """SQLite: a database file, to be put in the place of the other while nothing runs. PostgreSQL: an archive for
    ``pg_restore --clean --if-exists``. Only its owner can read it. Raises :class:`StateError`.
    """
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError as error:
        raise StateError(f"{target} cannot be made ({error.strerror}). Name a file that is not there yet.") from None
    try:
        if database.is_sqlite:
            _sqlite(database, target)
        else:
            _postgresql(database, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _sqlite(database: Database, target: Path) -> None:
    with database.unprepared(write=False) as connection, closing(sqlite3.connect(target)) as copy:
        raw = connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        raw.backup(copy)


def _postgresql(database: Database, target: Path) -> None:
    with database.unprepared(write=False) as connection:
        major = int((connection.dialect.server_version_info or (0,))[0])
    url = database.url.set(drivername="postgresql")
    environment = {**os.environ, "PGPASSWORD": url.password or os.environ.get("PGPASSWORD", "")}
    shown = url.set(password=None).render_as_string(hide_password=False)
    command = [_pg_dump(major), "--format=custom", f"--file={target}", f"--dbname={shown}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise Away(said[0] if said else f"pg_dump ended with {done.returncode}")


def _pg_dump(major: int) -> str:
    """One that is not older than the server."""
    for folder in sorted(_DEBIAN.glob("*/bin"), key=lambda path: path.parent.name):
        if folder.parent.name.isdigit() and int(folder.parent.name) >= major and (folder / "pg_dump").exists():
            return str(folder / "pg_dump")
    found = shutil.which("pg_dump")
    if found is None:
        raise StateError(
            f"A backup of PostgreSQL needs its program pg_dump, version {major} or newer. Install PostgreSQL's client "
            "programs here, or run pg_dump where the server is."
        )
    return found
