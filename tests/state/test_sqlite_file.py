"""An SQLite file that several connections write, while its journal is copied into it."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serve_app.state.names import FILE
from serve_app.state.protocols import Row
from serve_app.state.store import sqlite_file
from serve_app.state.store.database import Database
from serve_app.state.store.sql import SqlStore


def trace(key: str) -> Row:
    return Row("trace", ("a", key), {"account": "a", "id": key, "ended": 1.0, "body": b"{}" * 200}, 400)


def keys(file: Path) -> set[str]:
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {id for (id,) in db.execute("SELECT id FROM traces")}


def test_nobody_can_write_while_the_journal_is_copied(store, tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_file, "JOURNAL_BYTES", 0)
    tried = []

    class Copier(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if "wal_checkpoint" in sql:
                with (
                    closing(sqlite3.connect(tmp_path / FILE, timeout=0.0)) as other,
                    pytest.raises(sqlite3.OperationalError, match="locked"),
                ):
                    other.execute("BEGIN IMMEDIATE")
                tried.append(sql)
            return super().execute(sql, *args)

    monkeypatch.setattr(sqlite_file.sqlite3, "connect", partial(sqlite3.connect, factory=Copier))
    store.write([trace("first")])
    assert tried


def test_sqlite_copies_nothing_by_itself(store):
    with store.database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA wal_autocheckpoint").scalar_one() == 0


@pytest.fixture
def journal(tmp_path):
    return tmp_path / f"{FILE}-wal"


@pytest.fixture
def store(tmp_path):
    with SqlStore(tmp_path) as made:
        made.open()
        yield made


def test_the_journal_stays_short(store, journal, monkeypatch):
    monkeypatch.setattr(sqlite_file, "JOURNAL_BYTES", 100_000)
    store.write([trace("first")])  # copies what making the tables has left
    sizes = []
    for number in range(200):
        store.write([trace(str(number))])
        sizes.append(journal.stat().st_size)
    # One that is copied is cut by the next commit.
    assert 100_000 <= max(sizes) < 200_000
    assert sum(after < before for before, after in zip(sizes, sizes[1:], strict=False)) > 2


def test_the_journal_of_a_linked_file_stays_short_as_well(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / FILE).symlink_to(tmp_path / "elsewhere" / FILE)
    with SqlStore(tmp_path / "home") as linked:
        linked.open()
        assert stat.S_IMODE((tmp_path / "elsewhere" / FILE).stat().st_mode) == 0o600
        monkeypatch.setattr(sqlite_file, "JOURNAL_BYTES", 0)
        linked.write([trace("first")])
        for number in range(30):
            linked.write([trace(str(number))])
        assert (tmp_path / "elsewhere" / f"{FILE}-wal").stat().st_size < 100_000


def test_what_a_reader_still_sees_is_copied_when_it_has_gone(store, journal, tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_file, "JOURNAL_BYTES", 0)
    with Database(tmp_path, None, lambda _: None).unprepared(write=False) as old:
        seen = old.exec_driver_sql("SELECT count(*) FROM traces").scalar_one()
        for number in range(50):
            store.write([trace(str(number))])
        assert old.exec_driver_sql("SELECT count(*) FROM traces").scalar_one() == seen
        held = journal.stat().st_size
    for number in range(2):
        store.write([trace(f"after-{number}")])
    assert journal.stat().st_size < held
    assert len(keys(tmp_path / FILE)) == 52


def test_who_writes_keeps_nobody_from_a_commit(store, tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_file, "JOURNAL_BYTES", 0)
    store.write([trace("first")])
    checkpoints = sqlite_file.Checkpoints(str(tmp_path / FILE))
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        checkpoints.after_commit()
        assert time.monotonic() - began < sqlite_file.TIMEOUT_S / 2
        other.execute("ROLLBACK")
    checkpoints.close()


def test_a_second_store_of_a_process_gives_up_no_lock(store, tmp_path, journal):
    """POSIX locks of a file end when its process closes any descriptor of it. Then another process would take itself
    for the last one that has the file open, and remove the journal.
    """
    with SqlStore(tmp_path) as two:
        two.open()
    looks = "import sqlite3,sys; db = sqlite3.connect(sys.argv[1]); db.execute('SELECT * FROM traces'); db.close()"
    subprocess.run([sys.executable, "-c", looks, str(tmp_path / FILE)], check=True, timeout=60)
    assert journal.exists()
    store.write([trace("later")])
    assert keys(tmp_path / FILE) == {"later"}
