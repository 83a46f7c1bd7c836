"""Faults of the chaos run, on processes and files of this test."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from benchmarks.chaos import chaos, network
from benchmarks.chaos.clock import Clock
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.injections import NotHere, clock_jumps, disk_full, killed, stopped, store_full, store_killed
from benchmarks.chaos.target import Target
from serve_app import run_directory
from serve_app.state.errors import Away
from serve_app.state.store.sql import SqlStore
from tests.benchmarks.chaos.test_ledger import entry

CACHE = next(fault.inject for fault in FAULTS if fault.name == "cache-damaged")
TELLS = "import sys, time\nfor line in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
LISTENS = """
import socket, sys
ours = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    ours.sendall(ours.recv(100) or sys.exit())
"""


@pytest.fixture
def peer():
    """Another process that says again what it hears; our end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([sys.executable, "-c", LISTENS, str(server.getsockname()[1])])
        ours, _ = server.accept()
    with ours:
        yield process, ours
    process.kill()
    process.wait()


def heard(ours: socket.socket, seconds: float) -> bytes:
    return ours.recv(100) if select.select([ours], [], [], seconds)[0] else b""


def target(tmp_path) -> Target:
    return Target("http://127.0.0.1:1", "key", tmp_path, os.getpid())


def test_packets_are_dropped_and_then_come_after_all(peer):
    if why := network.can_reach_sockets():
        pytest.skip(why)
    process, ours = peer
    ours.sendall(b"one")
    assert heard(ours, 5) == b"one"
    with network.lossy([os.getpid()], [process.pid], 1.0) as connections:
        assert connections == 1
        ours.sendall(b"two")
        assert heard(ours, 0.3) == b""
    assert heard(ours, 10) == b"two"


def test_what_is_sent_is_told_late_and_all_of_it_in_order(peer):
    if why := network.can_reach_sockets():
        pytest.skip(why)
    process, ours = peer
    since = time.monotonic()
    with network.late([os.getpid()], [process.pid], 0.5) as connections:
        assert connections == 1
        got = b""
        for word in (b"one ", b"two ", b"three"):
            ours.sendall(word)
        while len(got) < 13:
            assert (more := heard(ours, 60))
            got += more
        assert got == b"one two three"
        # The other one hears it after half a second, and so do we.
        assert time.monotonic() - since > 0.5
    ours.sendall(b"four")
    assert heard(ours, 60) == b"four"


def test_a_clock_jumps_for_one_server_alone(tmp_path):
    found = target(tmp_path)
    found.clock = Clock(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", TELLS], env={**os.environ, **found.clock.environment}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def ahead() -> float:
        """Seconds by which its clock is before ours; its monotonic clock is ours."""
        before = time.time(), time.monotonic()
        process.stdin.write("\n")
        process.stdin.flush()
        wall, steady = map(float, process.stdout.readline().split())
        assert before[1] <= steady <= time.monotonic()
        return wall - before[0] - (steady - before[1])

    jumps = set()
    for seed in range(12):
        assert abs(ahead()) < 1
        with clock_jumps(found, random.Random(seed)) as what:
            assert abs(ahead() - float(what.split()[0])) < 1
        jumps.add(what)
    assert {what[0] for what in jumps} == {"+", "-"}
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_postgresql_that_can_write_nothing_has_all_that_it_confirmed(postgres_server, tmp_path):
    url, found = postgres_server.create(), target(tmp_path)
    found.postgresql = postgres_server
    with SqlStore(tmp_path, url) as store:
        store.open()
        store.write([entry("before").row()])
        with store_full(found, random.Random(0)):
            for _ in range(3):
                with pytest.raises(Away):
                    store.write([entry("meanwhile").row()])
        until = time.monotonic() + 60
        while True:
            try:
                store.write([entry("after").row()])
                break
            except Away:
                assert time.monotonic() < until
                time.sleep(0.1)
        assert store.ledger.entry("before") is not None and store.ledger.entry("after") is not None
    postgres_server.drop(url)


def test_connections_are_cut(peer):
    if why := network.can_reach_sockets():
        pytest.skip(why)
    process, ours = peer
    assert network.cut([os.getpid()], [process.pid]) == 1
    assert process.wait(60) == 0


def test_who_listens_at_a_port_is_found(peer):
    process, ours = peer
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.listener([process.pid, os.getpid()], port) == os.getpid()
        assert network.listener([process.pid], port) is None
        assert network.listener([os.getpid()], ours.getpeername()[1]) is None


def test_a_proxy_in_front_of_the_store():
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        proxy = network.Proxy("127.0.0.1", upstream.getsockname()[1])
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(b"query")
            server, _ = upstream.accept()
            assert heard(server, 5) == b"query"
            proxy.set("silent")
            server.sendall(b"rows")
            assert heard(client, 0.2) == b""
            proxy.set("through")
            assert heard(client, 5) == b"rows"
            proxy.set("refuse")
            assert heard_end(client)
            server.close()
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            assert heard_end(client)
        proxy.close()


def heard_end(client: socket.socket) -> bool:
    client.settimeout(60)
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True


def test_processes_are_stopped_and_killed(tmp_path, peer):
    process, ours = peer
    dice = random.Random(0)
    with stopped(lambda _: [process.pid])(target(tmp_path), dice):
        ours.sendall(b"x")
        assert heard(ours, 0.2) == b""
    assert heard(ours, 5) == b"x"
    with killed(lambda _: [process.pid])(target(tmp_path), dice):
        assert process.wait(60) == -signal.SIGKILL
    with pytest.raises(NotHere), killed(lambda _: [])(target(tmp_path), dice):
        pass


def test_a_killed_postgresql_is_started_again_with_what_was_written(postgres_server, tmp_path):
    url, found = postgres_server.create(), target(tmp_path)
    found.postgresql = postgres_server
    hit = set()
    with SqlStore(tmp_path, url) as store:
        store.open()
        for seed in range(20):
            store.write([entry(f"r{seed}").row()])
            with store_killed(found, random.Random(seed)) as what:
                hit.add(what.startswith("all"))
                if what.startswith("all"):
                    with pytest.raises(Away):
                        store.revisions()
            found_again, until = None, time.monotonic() + 60
            while found_again is None and time.monotonic() < until:
                with contextlib.suppress(Away):
                    found_again = store.ledger.entry(f"r{seed}")
            assert found_again is not None
            if hit == {True, False}:
                break
        else:
            pytest.fail(f"only {hit}")
    postgres_server.drop(url)


def test_a_full_disk_is_full_for_one_process_and_empty_again(tmp_path):
    file = tmp_path / "file"
    with disk_full(lambda _: [os.getpid()])(target(tmp_path), random.Random(0)):
        file.write_bytes(b"x" * 4096)
        with pytest.raises(OSError, match="too large"):
            file.write_bytes(b"x" * 5000)
    file.write_bytes(b"x" * 5000)


def test_cache_files_are_damaged(tmp_path):
    with pytest.raises(NotHere), CACHE(target(tmp_path), random.Random(0)):
        pass
    folder = tmp_path / "kv" / "0" / "ab"
    folder.mkdir(parents=True)
    for n in range(40):
        (folder / f"{n:02}.kv").write_bytes(b"x" * 100)
    with CACHE(target(tmp_path), random.Random(0)) as what:
        left = [path.read_bytes() for path in folder.iterdir()]
    damaged = 40 - left.count(b"x" * 100)
    assert what == f"{damaged} files" and 10 < damaged < 40
    # Files that an earlier fault has emptied are there as well.
    for seed in range(10):
        with CACHE(target(tmp_path), random.Random(seed)):
            pass


def test_what_a_server_leaves_behind_is_seen(tmp_path, peer, monkeypatch):
    process, _ = peer
    monkeypatch.setattr("benchmarks.chaos.target.GONE_S", 0.3)
    found = target(tmp_path)
    found.look()
    found.seen = {key: name for key, name in found.seen.items() if key[0] == process.pid}
    assert len(found.left()) == 1
    process.kill()
    process.wait()
    assert found.left() == []
    with chaos.short_folder() as temporary:
        # A folder in it leaves room for sockets.
        assert len(os.fsencode(temporary)) + 1 + len(run_directory.PREFIX) + 8 <= run_directory.MAX_PATH
        found.temporary = temporary
        (temporary / "ray").mkdir()
        assert found.left() == [str(temporary / "ray")]
    assert not temporary.exists()
