"""Entries on their way: safe before anybody is told, counted once across lost stores, full disks and dead processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from serve_app.api.errors import BooksClosed
from serve_app.state import insisting
from serve_app.state.errors import Away
from serve_app.state.spending import ledger_writer
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.ledger_writer import LedgerWriter
from tests.state.spending.test_ledger import ENTRY
from tests.waiting import until


class Store:
    """Takes entries when it is there."""

    def __init__(self) -> None:
        self.there = True
        self.ids: list[str] = []
        # How many writes fail for a reason of their own.
        self.failing = 0

    def write(self, rows) -> None:
        if not self.there:
            raise Away("gone")
        if self.failing:
            self.failing -= 1
            raise RuntimeError("something of the moment")
        if any(row.columns["model"] == "bad" for row in rows):
            raise ValueError("bad")
        self.ids += [row.key[0] for row in rows]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Iterator[object]:
    made: list[LedgerWriter] = []

    def writer(**more) -> LedgerWriter:
        made.append(LedgerWriter(store, tmp_path / "ledger", **more))
        return made[-1]

    yield writer
    for one in made:
        one.finish()
        one.close()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "ledger").glob("*.journal"))


async def test_what_is_safe_is_on_disk_and_reaches_the_store_later(make, store, tmp_path):
    writer = make()
    writer.check()
    await asyncio.gather(*(writer.enter(replace(ENTRY, id=f"r{n}")) for n in range(50)))
    [file] = files(tmp_path)
    assert file.read_bytes().count(b"0123456789ab") == 50 == writer.waiting and store.ids == []
    writer.flush()
    assert sorted(store.ids) == sorted(f"r{n}" for n in range(50)) and writer.waiting == 0 == file.stat().st_size
    await writer.enter(replace(ENTRY, id="later"))
    writer.flush()
    assert store.ids[50:] == ["later"]


async def test_entries_that_come_together_are_written_together(make, monkeypatch):
    writer = make()
    written = []
    journal = writer._segments[0].journal
    append = journal.append
    monkeypatch.setattr(journal, "append", lambda rows: (written.append(len(rows)), append(rows)))
    first = writer.enter(ENTRY)
    rest = [writer.enter(replace(ENTRY, id=f"r{n}")) for n in range(1, 200)]
    await asyncio.gather(first, *rest)
    assert sum(written) == 200 and len(written) < 20


async def test_more_entries_than_a_group_has_are_all_written(make, store, monkeypatch):
    monkeypatch.setattr(ledger_writer, "GROUP", 10)
    writer = make()
    with writer._lock:  # they wait while the first is written
        entered = [writer.enter(replace(ENTRY, id=f"r{n}")) for n in range(200)]
    async with asyncio.timeout(30):
        await asyncio.gather(*entered)
    writer.flush()
    assert sorted(store.ids) == sorted(f"r{n}" for n in range(200))


async def test_with_fsync_an_entry_outlives_a_loss_of_power_before_anybody_is_told(make, store, tmp_path, monkeypatch):
    synced: list[int] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    writer = make(fsync=True)
    await writer.enter(replace(ENTRY, id="r0"))
    [file] = files(tmp_path)
    assert synced == [file.stat().st_size] != [0]
    await asyncio.gather(*(writer.enter(replace(ENTRY, id=f"r{n}")) for n in range(1, 50)))
    # One for each group.
    assert 1 < len(synced) < 25 and synced[-1] == file.stat().st_size and store.ids == []
    count = len(synced)
    await make().enter(replace(ENTRY, id="plain"))
    assert len(synced) == count


async def test_a_disk_that_cannot_sync_has_nothing(make, store, tmp_path, monkeypatch):
    def fdatasync(descriptor: int) -> None:
        raise OSError(errno.EIO, "no")

    writer = make(fsync=True)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    await writer.enter(replace(ENTRY, id="r0"))
    assert store.ids == ["r0"] and [file.stat().st_size for file in files(tmp_path)] == [0]
    store.there = False
    with pytest.raises(BooksClosed):
        await writer.enter(replace(ENTRY, id="r1"))


async def test_while_the_store_is_away_the_disk_holds_what_waits(make, store, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_writer, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(ledger_writer, "MAX_SEGMENTS", 3)
    store.there = False
    writer = make()
    for n in range(120):
        await writer.enter(replace(ENTRY, id=f"r{n}"))
    with pytest.raises(Away):
        writer.flush()
    # Memory holds the newest only.
    assert 0 < writer.waiting < 40 and len(files(tmp_path)) > 6 and writer.waiting_bytes > 12_000
    store.there = True
    writer.flush()
    while len(files(tmp_path)) > 1:
        writer.adopt()
    assert sorted(store.ids) == sorted(f"r{n}" for n in range(120)) and writer.waiting == 0


async def test_an_answer_that_ends_with_its_gateway_is_written_down(make, store, tmp_path):
    writer = make()
    await writer.enter(ENTRY)
    writer.finish()
    await writer.enter(replace(ENTRY, id="last"))
    writer.close()
    await writer.enter(replace(ENTRY, id="behind it"))
    writer.close()
    for _ in files(tmp_path):
        make().adopt()
    assert sorted(store.ids) == ["behind it", "last", "r0"] and not files(tmp_path)


async def test_no_entry_is_given_up_for_what_passes(make, store, monkeypatch):
    monkeypatch.setattr(insisting, "PAUSE_S", 0.01)
    writer = make()
    await writer.enter(ENTRY)
    store.failing = 2
    writer.flush()
    assert store.ids == [ENTRY.id] and writer.lost == 0


async def test_an_entry_that_no_store_takes_keeps_no_other(make, store, tmp_path, monkeypatch):
    monkeypatch.setattr(insisting, "PAUSE_S", 0.01)
    writer = make()
    for n, model in enumerate(("a", "bad", "b")):
        await writer.enter(replace(ENTRY, id=f"r{n}", model=model))
    writer.flush()
    assert store.ids == ["r0", "r2"] and writer.lost == 1 and writer.waiting == 0
    # An operator can see what it was.
    kept = tmp_path / "ledger" / ledger_writer.REFUSED
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert Entry.of(json.loads(kept.read_text())) == replace(ENTRY, id="r1", model="bad")


@pytest.fixture
def disk(monkeypatch) -> Iterator[object]:
    """``disk(bytes)``: no file of this process grows beyond; None: they do again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(most: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if most is None else most, before[1]))

    monkeypatch.setattr(ledger_writer, "TRY_S", 0.01)
    yield limit
    limit(None)


async def until_open(writer: LedgerWriter) -> None:
    await until(lambda: writer.problem is None)


async def test_with_a_full_disk_the_store_takes_them_or_nobody_does(make, store, disk):
    writer = make()
    await writer.enter(ENTRY)
    disk(100)
    # The store is elsewhere, and there is all that is needed.
    await writer.enter(replace(ENTRY, id="r1"))
    assert store.ids == ["r1"]
    writer.check()
    store.there = False
    with pytest.raises(BooksClosed):
        await writer.enter(replace(ENTRY, id="forgotten"))
    with pytest.raises(BooksClosed):
        await writer.enter(replace(ENTRY, id="seen"), shown=True)
    with pytest.raises(BooksClosed):
        writer.check()
    assert BooksClosed().status == 503 and BooksClosed().headers["Retry-After"]
    disk(None)
    await until_open(writer)
    writer.check()
    store.there = True
    writer.flush()
    # A whole answer that was refused costs nothing; what a client had seen is charged.
    assert sorted(store.ids) == ["r0", "r1", "seen"]


async def test_an_operator_may_have_requests_served_all_the_same(make, store, disk):
    store.there = False
    writer = make(give_away=True)
    disk(0)
    await writer.enter(ENTRY)
    writer.check()
    assert writer.problem is not None and writer.waiting == 1
    disk(None)
    await until_open(writer)
    store.there = True
    writer.flush()
    assert store.ids == ["r0"]


CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from msgspec.structs import replace
from serve_app.state.spending.ledger_writer import LedgerWriter
from tests.state.spending.test_ledger import ENTRY

async def main():
    writer = LedgerWriter(None, Path(sys.argv[1]))
    await asyncio.gather(*(writer.enter(replace(ENTRY, id=f"r{n}")) for n in range(20)))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_killed_gateways_entries_are_taken_over(make, store, tmp_path):
    ended = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "ledger")], env=os.environ, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    [file] = files(tmp_path)
    with file.open("ab") as torn:
        torn.write(b"\\x50\\x00\\x00\\x00half an entry")
    one, other = make(), make()
    store.there = False
    with pytest.raises(Away):
        one.adopt()
    store.there = True
    other.adopt()
    one.adopt()
    assert sorted(store.ids) == sorted(f"r{n}" for n in range(20)) and not files(tmp_path)


@pytest.mark.parametrize("part", ["length", "checksum", "body"])
async def test_a_damaged_record_of_a_journal_hides_no_other(make, store, tmp_path, caplog, part):
    writer = make()
    for n in range(3):
        await writer.enter(replace(ENTRY, id=f"r{n}"))
    writer.finish()
    writer.close()
    [file] = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[len(data) // 3 + {"length": 2, "checksum": 5, "body": 40}[part]] ^= 0xFF
    file.write_bytes(data)
    make().adopt()
    assert store.ids == ["r0", "r2"] and file.with_suffix(".damaged").read_bytes() == data
    assert "is kept as" in caplog.text
