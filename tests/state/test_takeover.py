"""What an earlier version left in a state directory: taken over once, and only then put aside."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from serve_app.state.callers.accounts import hash_key
from serve_app.state.callers.accounts_file import read_accounts
from serve_app.state.check import check
from serve_app.state.errors import AccountsError, StateError
from serve_app.state.store.sql import SqlStore

HASH = hash_key("an old key of team-a")


def old_home(home: Path) -> None:
    """As the version before the store wrote it, its last writes still in the journals beside the files."""
    home.mkdir(parents=True)
    key = {"hash": HASH, "priority": "batch", "created": "2026-11-21"}
    (home / "accounts.yaml").write_text(yaml.safe_dump({"accounts": {"team-a": {"weight": 2.0, "keys": [key]}}}))
    tables = {
        "responses.sqlite3": (
            "CREATE TABLE responses (id TEXT PRIMARY KEY, account TEXT NOT NULL, created REAL NOT NULL, previous TEXT, "
            "size INTEGER NOT NULL, turn BLOB NOT NULL, body BLOB NOT NULL)",
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (f"resp_{n}", "team-a", time.time() + n, f"resp_{n - 1}" if n else None, 9, b"[]", b"{}")
                for n in range(1200)
            ],
        ),
        "paths.sqlite3": (
            "CREATE TABLE paths (account TEXT NOT NULL, id TEXT NOT NULL, ended REAL NOT NULL, body BLOB NOT NULL, "
            "PRIMARY KEY (account, id)) WITHOUT ROWID",
            "INSERT INTO paths VALUES (?, ?, ?, ?)",
            [("team-a", "r1", 1.0, b'{"id":"r1"}')],
        ),
        "rates.sqlite3": (
            "CREATE TABLE requests (account TEXT, task TEXT, window INTEGER, count INTEGER, "
            "PRIMARY KEY (account, task))",
            "INSERT INTO requests VALUES (?, ?, ?, ?)",
            [("team-a", "t", int(time.time() // 60), 41), ("team-b", "t", 5, 41)],
        ),
    }
    code = f"""
import os, sqlite3
kept = []
for name, (schema, insert, rows) in {tables!r}.items():
    kept.append(db := sqlite3.connect(os.path.join({str(home)!r}, name)))
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(schema)
    db.executemany(insert, rows)
    db.commit()
os._exit(0)
"""
    subprocess.run([sys.executable, "-"], input=code.encode(), check=True)
    assert (home / "responses.sqlite3-wal").exists()


def test_an_old_state_directory_is_taken_over_once(open_store, tmp_path):
    home = tmp_path / "home"
    old_home(home)
    store = open_store("home")
    store.open()
    [account] = store.accounts.all().values()
    assert (account.name, account.weight) == ("team-a", 2.0)
    assert [(key.hash, key.priority, key.created) for key in account.keys] == [(HASH, "batch", "2026-11-21")]
    assert len(store.responses.chain("team-a", "resp_999", 2000)) == 1000
    assert store.responses.body("team-a", "resp_1199") == b"{}" and store.responses.body("team-b", "resp_1") is None
    assert store.traces.body("team-a", "r1") == b'{"id":"r1"}'
    names = {"accounts.yaml", "responses.sqlite3", "paths.sqlite3", "rates.sqlite3"}
    left = {path.name for path in home.iterdir()} - {"state.sqlite3"}
    assert {f"{name}.taken-over" for name in names} <= left and not names & left
    # What lies aside is whole.
    aside = sqlite3.connect(home / "responses.sqlite3.taken-over")
    assert aside.execute("SELECT count(*) FROM responses").fetchone() == (1200,)
    aside.close()
    # What has gone since does not come back.
    store.accounts.remove("team-a")
    open_store("home").open()
    assert store.accounts.all() == {}


def test_each_node_brings_its_own(open_store, tmp_path):
    for node in ("one", "two"):
        (tmp_path / node).mkdir()
        key = {"hash": hash_key(node)}
        entry = {"both": {"weight": 2.0, "keys": [key]}, f"only-{node}": {"keys": [{"hash": hash_key("x" + node)}]}}
        (tmp_path / node / "accounts.yaml").write_text(yaml.safe_dump({"accounts": entry}))
        open_store(node).open()
    found = open_store().accounts.all()
    assert {name: len(account.keys) for name, account in found.items()} == {"both": 2, "only-one": 1, "only-two": 1}


@pytest.mark.parametrize(
    "text",
    [
        "accounts: [1]",
        "- x",
        "accounts: {a: 3}",
        "accounts: {a: {keys: [{hash: abc}]}}",
        "accounts: {a: {weight: -1}}",
        "accounts: {a: {weight: .nan}}",
        "accounts: {a: {weight: true}}",
        "accounts: {'../x': {}}",
        "accounts: {a: {keys: [{hash: " + "0" * 64 + ", priority: first}]}}",
        "{",
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_of_accounts_is_an_error_for_people(tmp_path, text):
    path = tmp_path / "accounts.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(AccountsError):
        read_accounts(path)


def test_what_cannot_be_read_stays_and_says_what_to_do(open_store, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "accounts.yaml").write_text("{")
    with pytest.raises(StateError, match="Correct or remove it"):
        open_store("home").open()
    (home / "accounts.yaml").unlink()
    (home / "responses.sqlite3").write_bytes(b"no database at all, and longer than a header")
    with pytest.raises(StateError, match="move it away"):
        open_store("home").open()
    assert (home / "responses.sqlite3").exists()
    (home / "responses.sqlite3").unlink()
    open_store("home").open()


def test_a_start_asks_for_a_store_only_where_there_is_something_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("serve_app.state.store.sql.SqlStore.open", lambda store: opened.append(store.name))
    opened: list[str] = []
    check(tmp_path, None)
    assert not opened and not list(tmp_path.iterdir())
    with SqlStore(tmp_path) as store:
        store.accounts.add("team-a")
        check(tmp_path, None)
        assert not opened
        with store.database.unprepared() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
            connection.exec_driver_sql("DELETE FROM schema_programs")
    check(tmp_path, None)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "accounts.yaml").write_text("{}")
    check(tmp_path / "new", None)
    check(tmp_path, "postgresql+psycopg://u@127.0.0.1:1/n")
    assert len(opened) == 3


def test_a_start_says_what_is_wrong_with_the_store(tmp_path):
    with SqlStore(tmp_path) as store:
        store.open()
        with store.database.unprepared() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
            connection.exec_driver_sql("DELETE FROM schema_programs")
    with pytest.raises(StateError, match="newer"):
        check(tmp_path, None)
    with pytest.raises(StateError, match="cannot be reached.*Start it, or correct the setting"):
        check(tmp_path, "postgresql+psycopg://u@127.0.0.1:1/n")
