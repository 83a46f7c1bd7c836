"""What a database's driver means by an error: that the database is away for now, that it is damaged, or that a
statement of ours is wrong.

Rows wait for a database that is away, and are dropped where they themselves are at fault. So what may pass, or what an
operator can mend, is "away".
"""

from __future__ import annotations

import sqlite3
from typing import Any, Literal

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

Meaning = Literal["away", "damaged", "foreign", "wrong"]

# https://www.sqlite.org/rescode.html: locked, the disk, the file's rights, memory; what was rolled back meanwhile.
_SQLITE: dict[int, Meaning] = dict.fromkeys(
    (
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_ABORT,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOLFS,
    ),
    "away",
)
_SQLITE |= {sqlite3.SQLITE_CORRUPT: "damaged", sqlite3.SQLITE_NOTADB: "damaged"}

# https://www.postgresql.org/docs/current/errcodes-appendix.html, by code and else by its class: connections, who we
# are, which database, deadlocks, resources, an operator's doing, the system; a standby that is no primary, a
# transaction that stood still; rights.
_POSTGRESQL: dict[str, Meaning] = dict.fromkeys(
    ("08", "28", "3D", "40", "53", "57", "58", "25006", "25P03", "42501", "55006", "55P03"), "away"
)
_POSTGRESQL |= {"XX001": "damaged", "XX002": "damaged", "42P01": "foreign", "42703": "foreign", "3F000": "foreign"}


def meaning(error: Exception) -> Meaning:
    """``foreign``: the tables are not this program's, perhaps while a backup is restored."""
    if isinstance(error, (PoolTimeout, OSError)):
        return "away"
    if not isinstance(error, DBAPIError):
        return "wrong"
    if error.connection_invalidated:
        return "away"
    return _sqlite(error.orig) if isinstance(error.orig, sqlite3.Error) else _postgresql(error)


def _sqlite(error: sqlite3.Error) -> Meaning:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return "away" if isinstance(error, sqlite3.OperationalError) else "wrong"
    # The upper bits say more than is asked for here.
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_ERROR and str(error).startswith(("no such table", "no such column")):
        return "foreign"
    return _SQLITE.get(primary, "wrong")


def _postgresql(error: DBAPIError) -> Meaning:
    code: Any = getattr(error.orig, "sqlstate", None)
    if not code:
        # Nothing came from the server: it is the connection.
        return "away" if isinstance(error, (OperationalError, InterfaceError)) else "wrong"
    return _POSTGRESQL.get(code) or _POSTGRESQL.get(code[:2], "wrong")


REMEDIES: dict[Meaning, str] = {
    "damaged": "it is damaged and left as it is. Stop what uses it, move it away (with its -wal and -shm), and put a "
    "backup in its place or start with an empty one; `serve-app db backup` makes backups",
    "foreign": "its tables are not this program's. Restore a backup of this program's version",
}
