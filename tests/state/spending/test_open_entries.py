"""Streams under way are charged for as far as they were sent, where their gateway is killed, and once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace

from serve_app.state.errors import Away
from serve_app.state.spending import ledger_writer
from serve_app.state.spending.ledger_writer import LedgerWriter
from serve_app.state.spending.open_entries import OpenEntries
from tests.state.gateways import until
from tests.state.spending.test_ledger import ENTRY

# A gateway with two streams under way, of which one ends; then it is killed.
KILLED = """
import asyncio, os, signal, sys
from msgspec.structs import replace
from pathlib import Path
from serve_app.state.spending import ledger_writer
from tests.state.spending.test_ledger import ENTRY
from tests.state.spending.test_open_entries import Store

async def main():
    ledger_writer.OPEN_S = 0.01
    writer = ledger_writer.LedgerWriter(Store(), Path(sys.argv[1]))
    for name in ("goes on", "ends"):
        writer.open(name, lambda name=name: replace(ENTRY, id=name, status="failed"))
    while not list(Path(sys.argv[1]).glob("*.open")):
        await asyncio.sleep(0.01)
    # What is under way is written no more: the end of one is in the journal alone, as if it had come just now.
    writer._tell_open = lambda: None
    await writer.enter(replace(ENTRY, id="ends", status="done"))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


class Store:
    """Takes entries when it is there, each once by its id."""

    def __init__(self) -> None:
        self.there = True
        self.found: dict[str, str] = {}

    def write(self, rows) -> None:
        if not self.there:
            raise Away("gone")
        for row in rows:
            self.found.setdefault(row.key[0], row.columns["status"])


def test_a_killed_gateways_streams_are_charged_behind_its_journal(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=os.environ, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert {".journal", ".open"} <= {path.suffix for path in tmp_path.iterdir()}
    store = Store()
    writer = LedgerWriter(store, tmp_path)
    store.there = False
    with pytest.raises(Away):
        writer.adopt_all()
    store.there = True
    assert writer.adopt_all()
    assert store.found == {"ends": "done", "goes on": "failed"} and not list(tmp_path.iterdir())
    writer.close()


def test_while_another_takes_the_journal_over_streams_wait(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=os.environ, timeout=300)
    store = Store()
    one, other = LedgerWriter(store, tmp_path), LedgerWriter(store, tmp_path)
    with one._segments[-1].journal.orphan() as rows:
        assert [row.key for row in rows] == [("ends",)]
        assert not other.adopt_all() and store.found == {}
        store.write(rows)
    assert other.adopt_all() and store.found == {"ends": "done", "goes on": "failed"}
    one.close()
    other.close()


async def test_what_has_ended_is_under_way_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_writer, "OPEN_S", 0.01)
    writer, looks = LedgerWriter(Store(), tmp_path), []
    for name in ("a", "b", "c"):
        writer.open(name, lambda name=name: looks.append(name) or (replace(ENTRY, id=name) if name != "c" else None))
    reader = OpenEntries(tmp_path, "reader")
    await until(lambda: list(tmp_path.glob("*.open")))
    # Its process lives: nobody else may have them.
    with reader.orphan() as rows:
        assert rows == [] and not reader.waits()
    await writer.enter(replace(ENTRY, id="a"))
    writer.forget("c")
    looks.clear()
    await until(lambda: looks)
    assert set(looks) == {"b"}
    await writer.enter(replace(ENTRY, id="b"))
    await until(lambda: not list(tmp_path.glob("*.open")))
    looks.clear()
    await asyncio.sleep(0.05)
    assert not looks
    writer.finish()
    writer.close()


async def test_looking_takes_a_hundredth_of_the_time_at_most(tmp_path, monkeypatch):
    waits = []
    writer = LedgerWriter(Store(), tmp_path)
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda pause, call: waits.append(pause))
    clock = iter([0.0, 0.1])
    monkeypatch.setattr(ledger_writer.time, "perf_counter", lambda: next(clock))
    writer.open("a", lambda: ENTRY)
    writer._tell_open()
    assert waits == [ledger_writer.OPEN_S, pytest.approx(0.1 / ledger_writer.OPEN_SHARE)]
    writer.finish()
    writer.close()


def test_leftovers_of_one_that_died_while_it_wrote(tmp_path):
    (tmp_path / "1-ab.opening").write_bytes(b"torn")
    with OpenEntries(tmp_path, "2-cd").orphan() as rows:
        assert rows == []
    assert not list(tmp_path.iterdir())
