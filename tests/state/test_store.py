"""The store's schema and transactions: the same on a file and on a server."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import re
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from benchmarks.serving.postgresql import programs
from serve_app.cli import main
from serve_app.state.callers.accounts import USUAL_SCOPES, hash_key
from serve_app.state.callers.book import AccountBook
from serve_app.state.errors import StateError
from serve_app.state.migrations import HEAD, SERVES
from serve_app.state.protocols import Row
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.quotas import NEURONS, Quota
from serve_app.state.store import migrate
from serve_app.state.store.database import Database, parse_url
from serve_app.state.store.deferred.queue_tables import metadata
from serve_app.state.store.spending import spent
from serve_app.state.store.sql import SqlStore


def trace(key: str, body: bytes = b"{}") -> Row:
    return Row("trace", ("a", key), {"account": "a", "id": key, "ended": 1.0, "body": body}, len(body))


def shape(connection: sa.Connection) -> dict[str, dict[str, object]]:
    """Everything about each table but the order of its columns, which a migration can't choose."""
    seen, found = sa.inspect(connection), {}
    for table in seen.get_table_names():
        columns = {
            c["name"]: (str(c["type"]), c["nullable"], re.sub(r"[()]", "", str(c["default"])), c.get("autoincrement"))
            for c in seen.get_columns(table)
        }
        keys = [(k["constrained_columns"], k["referred_table"], k["options"]) for k in seen.get_foreign_keys(table)]
        indexes = {
            i["name"]: (i["column_names"], i["unique"], {k: str(v) for k, v in i.get("dialect_options", {}).items()})
            for i in seen.get_indexes(table)
        }
        unique = sorted(str(u["column_names"]) for u in seen.get_unique_constraints(table))
        checks = sorted(c["sqltext"] for c in seen.get_check_constraints(table))
        primary = seen.get_pk_constraint(table)["constrained_columns"]
        found[table] = {
            "columns": columns,
            "keys": keys,
            "indexes": indexes,
            "primary": primary,
            "more": (unique, checks),
        }
    return found


def test_migrations_lead_to_the_tables_that_are_declared(database, tmp_path):
    """And an empty database, which gets those at once, is as if it had been migrated."""
    with closing(Database(tmp_path / "old", database, lambda _: None)) as old, old.unprepared() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        migrated = shape(connection)
        first = connection.execute(sa.text("SELECT * FROM ledger_closed")).all()
        everything = sa.MetaData()
        everything.reflect(connection)
        everything.drop_all(connection)
    with closing(Database(tmp_path / "new", database, lambda _: None)) as new:
        assert migrate.version(new) is None and migrate.upgrade(new) and not migrate.upgrade(new)
        assert migrate.version(new) == HEAD == ScriptDirectory.from_config(migrate._config()).get_current_head()
        with new.unprepared() as connection:
            made = shape(connection)
            then = connection.execute(sa.text("SELECT * FROM ledger_closed")).all()
    assert made.keys() == migrated.keys()
    for table, told in migrated.items():
        assert made[table] == told, table
    assert 0 <= then[0][0] - first[0][0] <= 1 and len(then) == 1


@pytest.mark.parametrize("before", ["0001", "0002"])
def test_a_store_of_an_earlier_version_is_upgraded_with_its_keys(database, tmp_path, before):
    """As `before` had it: rows go on, and keys do what they could."""
    key = "a key that was made before there were scopes"
    with closing(Database(tmp_path / "old", database, lambda _: None)) as old, old.unprepared() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, before)
        connection.execute(sa.text("INSERT INTO accounts (name, weight) VALUES ('team-a', 2.5)"))
        columns = {"hash": hash_key(key), "created": "2026-11-21"}
        row = sa.text("INSERT INTO keys (hash, account, priority, created) VALUES (:hash, 'team-a', 'batch', :created)")
        connection.execute(row, columns)
        connection.execute(sa.text("INSERT INTO traces VALUES ('team-a', 'r1', 1.0, :body)"), {"body": b"{}"})
    with SqlStore(tmp_path / "new", database) as store:
        store.open()
        [account] = store.accounts.all().values()
        [known] = account.keys
        assert (account.weight, known.id, known.created) == (2.5, hash_key(key)[:12], "2026-11-21")
        assert known.scopes == USUAL_SCOPES and known.enabled and known.expires is None
        book = AccountBook("local", ())
        book.fill(store.accounts.all())
        assert book.find(key).priority == "batch" and store.traces.body("team-a", "r1") == b"{}"
        assert migrate.version(store.database) == HEAD


def test_processes_that_start_at_once_make_the_schema_once(database, tmp_path):
    forks = multiprocessing.get_context("fork")
    at_once = forks.Barrier(3)

    def start(number: int) -> None:
        at_once.wait(60)
        with SqlStore(tmp_path / f"home{number}", database) as store:
            store.open()
            store.accounts.add(f"team-{number}")

    started = [forks.Process(target=start, args=(number,)) for number in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [0] * 3
    with SqlStore(tmp_path / "home0", database) as store:
        assert len(store.accounts.all()) == 3


def test_a_newer_schema_that_says_so_can_be_used(store, open_store, caplog):
    with store.database.unprepared() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(sa.text("ALTER TABLE accounts ADD COLUMN later VARCHAR DEFAULT 'x' NOT NULL"))
        connection.execute(sa.text("INSERT INTO schema_programs VALUES ('9999')"))
    caplog.set_level(logging.INFO, "ray.serve")
    again = open_store("home")
    key = again.accounts.add("team-b")
    assert key and "team-b" in again.accounts.all() and migrate.version(again.database) == "9999"
    assert f"this one knows {HEAD} and can use it" in caplog.text


def additive(before: dict, after: dict) -> str:
    """What a program that knows ``before`` would not find or could not leave out in ``after``; "": nothing."""
    for table, columns in before.items():
        for name, kind in columns.items():
            if after.get(table, {}).get(name, (None,))[0] != kind[0]:
                return f"{table}.{name}"
        for name in after[table].keys() - columns.keys():
            if not after[table][name][1]:
                return f"{table}.{name} is needed"
    return ""


def columns_of(connection) -> dict:
    """Table to column to its type, and whether it may be left out."""
    tables = sa.MetaData()
    tables.reflect(connection)
    return {
        table.name: {c.name: (str(c.type), c.nullable or c.server_default is not None) for c in table.columns}
        for table in tables.tables.values()
    }


def test_older_programs_that_are_named_can_use_the_schema(database, tmp_path):
    with closing(Database(tmp_path / "x", database, lambda _: None)) as old, old.unprepared() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        found = {}
        for version in (*sorted(SERVES), HEAD):
            command.upgrade(config, version)
            found[version] = columns_of(connection)
    for version in SERVES:
        assert additive(found[version], found[HEAD]) == "", f"programs of {version} cannot use {HEAD}"
    # What would be found.
    one = {"t": {"a": ("VARCHAR", False)}}
    assert additive(one, {"t": {"a": ("VARCHAR", False), "b": ("VARCHAR", True)}, "u": {}}) == ""
    assert additive(one, {"t": {"a": ("VARCHAR", False), "b": ("VARCHAR", False)}}) == "t.b is needed"
    assert additive(one, {"t": {"b": ("VARCHAR", True)}}) == additive(one, {}) == "t.a"


def test_a_newer_schema_is_refused_and_stays_as_it_is(store, open_store, database, tmp_path, monkeypatch, capsys):
    key = store.accounts.add("team-a")
    with store.database.unprepared() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(sa.text("DELETE FROM schema_programs"))
    later = open_store()
    for _ in range(2):
        with pytest.raises(StateError, match="9999.*newer than this program's.*restore the backup"):
            later.open()
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERVE_APP_DATABASE", database)
    assert main(["accounts", "list"]) == 2 and "newer" in capsys.readouterr().err
    assert main(["db", "status"]) == 0 and "9999" in capsys.readouterr().out
    # A program that is at work goes on.
    assert "team-a" in store.accounts.all() and key
    assert migrate.version(store.database) == "9999"


def test_a_group_is_written_as_a_whole_or_not_at_all(store):
    with pytest.raises(sa.exc.SQLAlchemyError):
        store.write(
            [trace("good"), Row("trace", ("a", "bad"), {"account": None, "id": "x", "ended": 1.0, "body": b""}, 0)]
        )
    assert store.traces.body("a", "good") is None
    store.write([trace("good"), trace("other", b"[1]")])
    store.write([trace("good", b"[2]")])
    assert (store.traces.body("a", "good"), store.traces.body("a", "other")) == (b"[2]", b"[1]")


def test_threads_share_a_store(store):
    numbers = itertools.count()

    def entry(name: str) -> Row:
        return Entry(name, "a", "k", 6000.0, 0.0, "m", "t", "done", {}, 1, 0, "USD").row()

    def count() -> None:
        for _ in range(20):
            store.write([entry(f"{threading.get_ident()}-{next(numbers)}")])

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.database.reading() as connection:
        assert spent.since(connection, Quota("a", "", NEURONS), 0) == 160


def test_only_the_owner_can_read_the_file(tmp_path):
    with SqlStore(tmp_path / "new") as store:
        store.accounts.add("team-a")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
        assert set(modes.values()) == {0o600} and "state.sqlite3" in modes


@pytest.mark.parametrize(("durable", "mode"), [(False, 1), (True, 2)])
def test_a_durable_store_syncs_what_it_commits(tmp_path, durable, mode):
    with SqlStore(tmp_path, durable=durable) as store, store.database.writing() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == mode


def test_other_databases_are_refused():
    for url in ("mysql://x/y", "oracle", "postgresql+asyncpg://h/n", "sqlite://"):
        with pytest.raises(StateError, match="postgresql\\+psycopg"):
            parse_url(url)
    assert parse_url("postgresql://u:p@h/n").drivername == "postgresql+psycopg"


def test_the_command_line_backs_up_what_can_be_opened_again(store, database, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERVE_APP_DATABASE", database)
    store.accounts.add("team-a", weight=2)
    store.write([trace("kept")])
    file = tmp_path / "copy"
    if (folder := programs()) is not None:
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    done = main(["db", "backup", str(file)])
    told = capsys.readouterr()
    assert done == 0, told.err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and str(file) in told.out
    assert main(["db", "backup", str(file)]) == 2 and "not there yet" in capsys.readouterr().err
    if database.startswith("sqlite"):
        with SqlStore(tmp_path / "other", f"sqlite:///{file}") as copy:
            assert copy.accounts.all() == store.accounts.all() and copy.traces.body("a", "kept") == b"{}"
    else:
        assert file.read_bytes().startswith(b"PGDMP")
    assert main(["db", "upgrade"]) == 0 and f"has schema {HEAD}" in capsys.readouterr().out
    assert main(["db", "status"]) == 0
    shown = capsys.readouterr().out
    assert HEAD in shown and "***" in shown if "@" in database else HEAD in shown


def test_a_database_that_is_not_there_is_told_with_a_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    monkeypatch.setenv("SERVE_APP_DATABASE", "postgresql+psycopg://u:secret-word@127.0.0.1:1/n")
    assert main(["accounts", "add", "team-a"]) == 2
    told = capsys.readouterr().err
    assert "cannot be reached" in told and "Start it, or correct the setting" in told and "secret-word" not in told


def test_migrations_are_part_of_the_package():
    folder = Path(migrate._FOLDER)
    assert {path.name for path in folder.iterdir()} >= {"__init__.py", "env.py", "versions"}
    assert all((path / "__init__.py").exists() for path in (folder, folder / "versions"))
