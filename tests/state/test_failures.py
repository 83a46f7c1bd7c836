"""What is wrong with a database: away for now, damaged and left as it is, or a statement of ours."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from serve_app.cli import main
from serve_app.state.errors import Away, Damaged
from serve_app.state.names import FILE
from serve_app.state.protocols import Row
from serve_app.state.store.database import RETRY_S
from serve_app.state.store.failures import meaning
from serve_app.state.store.sql import SqlStore


def trace(key: str) -> Row:
    return Row("trace", ("a", key), {"account": "a", "id": key, "ended": 1.0, "body": b"{}" * 200}, 400)


@pytest.fixture
def store(tmp_path):
    with SqlStore(tmp_path) as made:
        made.open()
        made.write([trace(str(n)) for n in range(200)])
        yield made


def settled(file: Path) -> None:
    """Everything is in the file itself, and nothing in its journal."""
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("57P01", "away"),  # shut down by an operator
        ("53100", "away"),  # its disk is full
        ("25006", "away"),  # a standby that is not the primary yet
        ("25P03", "away"),  # nothing happened in a transaction for too long
        ("28P01", "away"),
        ("3D000", "away"),
        ("40P01", "away"),
        ("55P03", "away"),
        ("42501", "away"),
        ("XX001", "damaged"),
        ("42P01", "foreign"),
        ("42601", "wrong"),
        ("22021", "wrong"),
        ("23505", "wrong"),
        ("54000", "wrong"),  # a row that no index takes: it would keep all others waiting for ever
    ],
)
def test_what_postgresql_says(code, found) -> None:
    error = psycopg.errors.lookup(code)("said")
    assert meaning(DBAPIError.instance("SELECT 1", {}, error, psycopg.Error)) == found


def test_a_connection_that_ends_is_away() -> None:
    lost = psycopg.OperationalError("server closed the connection unexpectedly")
    assert meaning(DBAPIError.instance("SELECT 1", {}, lost, psycopg.Error)) == "away"
    assert meaning(OSError("no route")) == "away" and meaning(ValueError("ours")) == "wrong"


def test_a_locked_file_is_away_and_comes_back(store, monkeypatch) -> None:
    with store.database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=10")
    with closing(sqlite3.connect(store.database.home / FILE)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Away, match="locked") as told:
            store.write([trace("x")])
        assert not isinstance(told.value, Damaged)
    time.sleep(RETRY_S)
    store.write([trace("x")])
    assert store.away is None


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_file_that_may_not_be_written_is_away(store) -> None:
    (store.database.home / FILE).chmod(0o400)
    store.close()
    with pytest.raises(Away, match="readonly"):
        store.write([trace("x")])


def test_a_full_disk_is_away(store) -> None:
    with store.database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=1")
    with pytest.raises(Away, match="full"):
        store.write([trace(f"x{n}") for n in range(500)])


def test_a_wrong_statement_is_an_error_of_ours(store) -> None:
    for statement in ("SELEC 1", "INSERT INTO traces (account) VALUES (1)"):
        with pytest.raises(DBAPIError), store.database.writing() as connection:
            connection.execute(sa.text(statement))
    assert store.away is None


def test_tables_of_another_program_are_waited_for(store) -> None:
    """As while a backup is being restored: nothing is lost meanwhile."""
    with closing(sqlite3.connect(store.database.home / FILE)) as other:
        other.execute("ALTER TABLE traces RENAME TO elsewhere")
    with pytest.raises(Away, match="no such table.*Restore a backup"):
        store.write([trace("x")])
    with closing(sqlite3.connect(store.database.home / FILE)) as other:
        other.execute("ALTER TABLE elsewhere RENAME TO traces")
    time.sleep(RETRY_S)
    store.write([trace("x")])


def test_a_damaged_file_is_written_no_more_until_another_is_in_its_place(store, tmp_path) -> None:
    file = tmp_path / FILE
    settled(file)
    good = tmp_path / "backup"
    shutil.copy(file, good)
    store.close()
    size = file.stat().st_size
    with file.open("r+b") as pages:
        pages.seek(4096)
        pages.write(b"\xff" * (size - 4096))
    damaged = file.read_bytes()
    with pytest.raises(Damaged, match="left as it is.*put a backup in its place"):
        store.write([trace(f"x{n}") for n in range(200)])
    for _ in range(2):
        time.sleep(RETRY_S)
        with pytest.raises(Damaged), store.database.reading() as connection:
            connection.execute(sa.text("SELECT 1"))
    assert file.read_bytes() == damaged
    os.replace(good, file)
    time.sleep(RETRY_S)
    store.write([trace("x")])
    assert store.away is None


@pytest.mark.parametrize("content", [b"no database at all" * 1000, b"SQLite format 3\0" + b"\xff" * 8176])
def test_a_start_on_a_damaged_file_ends_with_a_remedy_and_leaves_it(tmp_path, monkeypatch, capsys, content) -> None:
    (tmp_path / FILE).write_bytes(content)
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    for command in (["accounts", "add", "team-a"], ["db", "upgrade"], ["db", "status"]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "damaged" in told and "backup" in told and "Traceback" not in told
        assert (tmp_path / FILE).read_bytes() == content
