"""SQLite files that gateways share: opened by many at once, private, and an honest error when somebody keeps them."""

from __future__ import annotations

import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.state import sqlite_file
from serve_app.state.sqlite_file import open_shared

SCHEMA = "CREATE TABLE IF NOT EXISTS n (k INTEGER PRIMARY KEY, count INTEGER);"


def test_many_open_a_new_file_at_once(tmp_path: Path):
    def count(path: Path) -> None:
        db = open_shared(path, SCHEMA, durable=False)
        with db:
            db.execute("INSERT INTO n VALUES (1, 1) ON CONFLICT (k) DO UPDATE SET count = count + 1")
        db.close()

    with ThreadPoolExecutor(8) as pool:
        for turn in range(20):
            path = tmp_path / "new" / f"{turn}.sqlite3"
            list(pool.map(count, [path] * 16))
            db = open_shared(path, SCHEMA, durable=True)
            assert db.execute("SELECT count FROM n").fetchone() == (16,)
            db.close()


def test_only_the_owner_can_read(tmp_path: Path):
    db = open_shared(tmp_path / "new" / "a.sqlite3", SCHEMA, durable=False)
    for path in [*(tmp_path / "new").iterdir(), tmp_path / "new"]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    db.close()


def test_a_file_that_stays_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite_file, "TIMEOUT_S", 0.05)
    holder = sqlite3.connect(tmp_path / "a.sqlite3")
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        open_shared(tmp_path / "a.sqlite3", SCHEMA, durable=False)
    holder.close()
