"""Rows on their way to the store: in groups, across its absence, and across the end of the process."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest

from serve_app.state import writer
from serve_app.state.errors import Away
from serve_app.state.journal import Journal
from serve_app.state.protocols import Row
from serve_app.state.writer import GroupWriter


class Store:
    """Takes rows when it is there; refuses those whose columns say so."""

    def __init__(self) -> None:
        self.there = True
        self.groups: list[list[Row]] = []

    def write(self, rows) -> None:
        if not self.there:
            raise Away("gone")
        if any(row.columns.get("bad") for row in rows):
            raise ValueError("bad")
        self.groups.append(list(rows))

    @property
    def keys(self) -> list[str]:
        return [row.key[0] for group in self.groups for row in group]


def row(n: int, **columns) -> Row:
    return Row("k", (f"{n}",), {"n": n, **columns}, 100)


@pytest.fixture
def store():
    return Store()


def make(store, folder: Path) -> GroupWriter:
    return GroupWriter(store, Journal(folder), lambda: None)


def test_what_waits_can_be_read_and_goes_together_in_order(store, tmp_path):
    group = make(store, tmp_path)
    safe = [group.add(row(n)) for n in range(5)]
    assert group.find("k", ("3",)) == {"n": 3} and group.find("k", ("9",)) is None and not any(s.done() for s in safe)
    group.add(Row("k", ("0",), {"n": 7}, 1))
    group.flush()
    assert [len(rows) for rows in store.groups] == [5] and store.keys == ["1", "2", "3", "4", "0"]
    assert store.groups[0][-1].columns == {"n": 7} and all(s.done() for s in safe)
    assert group.rows == group.bytes == 0 and group.find("k", ("3",)) is None
    assert not list(tmp_path.iterdir())


def test_large_numbers_go_in_several_transactions(store, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "GROUP", 10)
    group = make(store, tmp_path)
    for n in range(25):
        group.add(row(n))
    group.flush()
    assert [len(rows) for rows in store.groups] == [10, 10, 5]


def test_one_bad_row_does_not_keep_the_others(store, tmp_path):
    group = make(store, tmp_path)
    safe = [group.add(row(n, bad=n == 1)) for n in range(3)]
    group.flush()
    assert store.keys == ["0", "2"] and group.lost == 1 and all(s.done() for s in safe) and group.rows == 0


def test_while_the_store_is_away_rows_are_safe_in_the_journal_and_each_goes_once(store, tmp_path):
    group = make(store, tmp_path / "journal")
    store.there = False
    safe = [group.add(row(n)) for n in range(3)]
    for _ in range(3):
        with pytest.raises(Away):
            group.flush()
    assert all(s.done() for s in safe) and group.rows == 3
    size = group.journal_bytes
    safe.append(group.add(row(3)))
    with pytest.raises(Away):
        group.flush()
    assert size < group.journal_bytes < 2 * size and safe[-1].done()
    store.there = True
    group.flush()
    assert store.keys == ["0", "1", "2", "3"] and group.journal_bytes == 0
    group.close()
    assert not list((tmp_path / "journal").iterdir())


def test_what_a_killed_process_leaves_the_next_one_writes(store, tmp_path):
    code = f"""
import os, signal, sys
from pathlib import Path
from serve_app.state.errors import Away
from serve_app.state.journal import Journal
from serve_app.state.protocols import Row
from serve_app.state.writer import GroupWriter
class Gone:
    def write(self, rows): raise Away("gone")
group = GroupWriter(Gone(), Journal(Path({str(tmp_path)!r})), lambda: None)
for n in range(3):
    group.add(Row("k", (f"{{n}}",), {{"n": n, "body": b"\\0\\xff"}}, 100))
    try: group.flush()
    except Away: pass
print("kept", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"kept\n"
    [file] = tmp_path.iterdir()
    # Whoever lives keeps its own.
    group = make(store, tmp_path)
    group.adopt()
    assert store.groups == [] and file.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with open(file, "ab") as torn:  # it died while it wrote
        torn.write(b"\x50\x00\x00\x00\x01\x02\x03\x04half")
    store.there = False
    with pytest.raises(Away):
        group.adopt()
    assert file.exists()
    store.there = True
    group.adopt()
    assert [r.columns for r in store.groups[0]] == [{"n": n, "body": b"\0\xff"} for n in range(3)]
    assert not file.exists()
    group.adopt()
    assert len(store.groups) == 1


def test_what_waits_at_the_end_is_the_next_ones(store, tmp_path):
    group = make(store, tmp_path)
    safe = group.add(row(1))
    group.close()
    assert safe.done()
    make(store, tmp_path).adopt()
    assert store.keys == ["1"]


def test_what_may_wait_is_bounded(store, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 10 * (100 + writer._OVERHEAD))
    group = make(store, tmp_path)
    store.there = False
    safe = []
    for n in range(100):
        safe.append(group.add(row(n)))
        assert group.bytes <= writer.MAX_WAITING_BYTES
        if n % 10 == 0:
            with pytest.raises(Away):
                group.flush()
    assert group.lost == 90 and group.rows == 10 and all(s.done() for s in safe[:90])
    assert group.journal_bytes <= 3 * writer.MAX_WAITING_BYTES
    store.there = True
    group.flush()
    assert store.keys == [f"{n}" for n in range(90, 100)]
    assert group.journal_bytes == 0


def test_a_journal_that_cannot_be_written_loses_nothing_in_memory(store, tmp_path):
    (tmp_path / "journal").write_text("a file where the folder should be")
    group = make(store, tmp_path / "journal")
    store.there = False
    safe = group.add(row(1))
    with pytest.raises(Away):
        group.flush()
    assert group.rows == 1 and not safe.done()
    store.there = True
    group.flush()
    assert store.keys == ["1"] and safe.done()


def test_much_that_waits_goes_in_parts_so_that_other_work_has_its_turn(store, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "GROUP", 10)
    group = make(store, tmp_path)
    for n in range(10 * writer.GROUPS + 5):
        group.add(row(n))
    group.flush()
    assert group.rows == 5
    store.there = False
    with pytest.raises(Away):
        group.flush()
    assert group.journal_bytes > 0
    store.there = True
    group.flush()
    assert group.rows == 0 and len(set(store.keys)) == len(store.keys) == 10 * writer.GROUPS + 5
    assert group.journal_bytes == 0


def test_a_disk_that_is_full_leaves_whole_records(store, tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append([row(1)])
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[: len(data) // 2]))
    with pytest.raises(OSError, match="No space left"):
        journal.append([row(2)])
    monkeypatch.undo()
    journal.append([row(3)])
    journal.close()
    with Journal(tmp_path).orphan() as rows:
        assert [found.key for found in rows] == [("1",), ("3",)]


@pytest.mark.parametrize("other", [None, [], ["k", ["0"], {}], ["k", "0", {}, 1], ["k", ["0"], {}, 1, 2], {"a": 1}])
def test_a_record_of_another_program_ends_its_journal_and_stops_nobody(store, tmp_path, other, caplog):
    """Its checksum is right, and yet it is no row of ours."""
    left = Journal(tmp_path / "journal")
    left.append([row(0)])
    body = msgspec.msgpack.encode(other)
    for name, before in (("1-first", b""), ("2-second", next((tmp_path / "journal").iterdir()).read_bytes())):
        record = struct.pack("<II", len(body), zlib.crc32(body)) + body
        (tmp_path / "journal" / f"{name}.journal").write_bytes(before + record)
    group = make(store, tmp_path / "journal")
    group.adopt()
    assert store.keys == ["0"] and "none of our records" in caplog.text
    left.close()
    # What it is can be looked at; nobody reads it again.
    kept = {path.name for path in (tmp_path / "journal").iterdir()}
    assert kept == {left._path.name, "1-first.damaged", "2-second.damaged"}
