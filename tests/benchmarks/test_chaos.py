"""The chaos run: what it holds answers to, its faults on processes of this test, and a short seed on the stack."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

from benchmarks.chaos import books, chaos, clients, ledger, network
from benchmarks.chaos.asks import Ask, asks
from benchmarks.chaos.books import Books
from benchmarks.chaos.clients import Clients, Way, _honest
from benchmarks.chaos.dialects import CHAT, MESSAGES, NATIVE, RESPONSES, Seen
from benchmarks.chaos.faults import FAULTS, selected
from benchmarks.chaos.injections import NotHere, cache_damaged, disk_full, killed, stopped, store_killed
from benchmarks.chaos.ledger import Receipts
from benchmarks.chaos.run import moments, plan
from benchmarks.chaos.target import Target
from benchmarks.chaos.weather import BROKEN, REFUSED, Weather
from serve_app import run_directory
from serve_app.state.errors import Away
from serve_app.state.ledger import Entry
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger as ledger_table
from serve_app.state.store.tables import ledger_days

USED = {"input_tokens": 3, "output_tokens": 4}
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


# -- answers ---------------------------------------------------------------------------------------------------------


def seen(**places: str) -> Seen:
    return Seen(texts=dict(places), usage=(3, 4), finished=True)


def test_an_answer_is_held_to_every_token_and_to_its_usage():
    assert seen(a="some text").problem(seen(a="some text")) is None
    assert "the text" in str(seen(a="some tex").problem(seen(a="some text")))
    assert "the text" in str(seen(a="x", b="y").problem(seen(a="x")))
    fewer = Seen(texts={"a": "x"}, usage=(3, 3))
    assert "usage" in str(fewer.problem(seen(a="x")))
    shown = Seen(texts={"a": "x"}, usage=(3, 4), logprobs=3)
    assert "3 tokens were shown and 4 are counted" in str(shown.problem(seen(a="x")))
    assert "numbers" in str(Seen(numbers=[1.0, 2.0]).problem(Seen(numbers=[1.0, 2.1])))


def test_what_was_shown_before_a_break_is_the_beginning():
    assert Seen(texts={"a": "some"}).part_problem(seen(a="some text")) is None
    assert Seen().part_problem(seen(a="some text")) is None
    assert "beginning" in str(Seen(texts={"a": "other"}).part_problem(seen(a="some text")))
    assert "beginning" in str(Seen(texts={"b": "x"}).part_problem(seen(a="some text")))


@pytest.mark.parametrize(
    ("dialect", "events"),
    [
        (NATIVE, [{"response": "to"}, {"response": "day", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}]),
        (CHAT, [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in ("to", "day")]),
        (CHAT, [{"choices": [{"index": 0, "text": piece}]} for piece in ("to", "day")]),
        (RESPONSES, [{"type": "response.output_text.delta", "output_index": 0, "delta": p} for p in ("to", "day")]),
        (MESSAGES, [{"type": "content_block_delta", "index": 0, "delta": {"text": piece}} for piece in ("to", "day")]),
    ],
)
def test_streams_of_all_dialects(dialect, events):
    found = Seen()
    for event in events:
        dialect.event(found, event)
    assert found.texts == {"0": "today"} and found.error is None


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        (NATIVE, {"errors": [{"code": 3040}]}),
        (CHAT, {"error": {"code": 3040}}),
        (RESPONSES, {"type": "response.failed"}),
        (MESSAGES, {"type": "error", "error": {"type": "overloaded_error"}}),
    ],
)
def test_errors_in_streams_of_all_dialects(dialect, event):
    found = Seen()
    dialect.event(found, event)
    assert found.error and not found.finished


# -- what is allowed -------------------------------------------------------------------------------------------------


def test_a_refusal_is_allowed_while_a_fault_says_so_and_never_else():
    weather = Weather()
    before = time.monotonic()
    window = weather.begin("gateway-killed", frozenset({REFUSED}))
    assert weather.saw("status 503", REFUSED, "chat", before)
    assert not weather.saw("no end", BROKEN, "chat", before)
    window.end = time.monotonic()
    assert weather.saw("status 503", REFUSED, "chat", before)
    time.sleep(0.001)
    assert not weather.saw("status 503", REFUSED, "chat", time.monotonic())
    assert weather.broken == 2 and weather.broke[0]["during"] == ["gateway-killed"] and not weather.broke[1]["during"]


def test_an_honest_refusal_says_when_to_come_back_and_why():
    import httpx

    body, waits = {"errors": [{"code": 3040}]}, {"retry-after": "1"}
    assert _honest(httpx.Response(503, json=body, headers=waits))
    assert not _honest(httpx.Response(503, json=body))
    assert not _honest(httpx.Response(503, html="<h1>503</h1>", headers=waits))
    assert not _honest(httpx.Response(500, json=body, headers=waits))


@pytest.mark.parametrize(("status", "body"), [(500, b"{}"), (200, b"data: [DONE]\n\n"), (200, b"{}")])
async def test_a_server_that_answers_wrongly_breaks_the_run(liar, status, body):
    weather = Weather()
    clients = Clients(liar(status, body).url, "key", weather)
    number = next(i for i, ask in enumerate(asks()) if ask.name == "native short")
    clients._wanted[number, True] = Seen(texts={"0": "text"}, usage=(3, 4))
    await clients._once(number, Way(stream=True))
    assert weather.broken
    await clients.http.aclose()


async def test_answers_are_looked_up_in_the_books(liar, monkeypatch):
    """Whose trace says that the client left, and whose stored response is another, breaks the run."""
    import httpx

    monkeypatch.setattr(books, "LATE_S", 0.0)
    kept = Books()
    kept.note("responses", Seen(texts={"0": "text"}, usage=(3, 4), request="r1", response="resp_1"))
    for status, found, broken in ((500, {}, 2), (200, {"status": "left", "output": [], "id": "", "usage": USED}, 2)):
        weather = Weather()
        async with httpx.AsyncClient(base_url=liar(status, json.dumps(found).encode()).url) as http:
            assert await kept.check(http, weather) == 1
        assert weather.broken == broken, weather.broke
    right = {"status": "done", "events": [{"event": "done", "completion_tokens": 4}], "id": "resp_1", "usage": USED,
             "output": [{"type": "message", "content": [{"text": "text"}]}]}  # fmt: skip
    weather = Weather()
    async with httpx.AsyncClient(base_url=liar(200, json.dumps(right).encode()).url) as http:
        await kept.check(http, weather)
    assert not weather.broken


# -- the ledger ------------------------------------------------------------------------------------------------------


def entry(request: str, **changes: object) -> Entry:
    fields = {"status": "done", "units": {"input_tokens": 3, "output_tokens": 4}, "neurons": 700, **changes}
    return Entry(request, "a", "k", time.time(), 0.1, "m", "t", money=5, currency="USD", **fields)


def wrong(store: SqlStore, *told: Seen, alone: bool = True) -> list[str]:
    receipts, weather = Receipts(), Weather()
    for one in told:
        receipts.note("chat", one, (3, 4))
    receipts.check(store, weather, alone=alone)
    return [found["what"] for found in weather.broke]


def test_the_ledger_is_held_against_what_clients_were_told(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LATE_S", 0.0)

    def told(request: str = "r1", **changes: object) -> Seen:
        return Seen(**{"usage": (3, 4), "neurons": 700, "finished": True, "request": request, **changes})

    with SqlStore(tmp_path) as store:
        store.open()
        store.write([entry("r1").row()])
        assert wrong(store, told()) == []
        assert "no entry" in wrong(store, told(), told("r2"))[0]
        assert "told (3, 5) tokens" in wrong(store, told(usage=(3, 5)))[0]
        assert "701 micro-neurons" in wrong(store, told(neurons=701))[0]
        assert "was refused" in wrong(store, told(refused=True, finished=False))[0]
        assert "nobody has asked for" in wrong(store)[0] and wrong(store, alone=False) == []
        # Its connection broke before its id was known: it may be the one that has the entry.
        assert wrong(store, told("", finished=False)) == []
        # Of another prompt it cannot be, and one request cannot have made two.
        store.write([entry("r9", units={"input_tokens": 4, "output_tokens": 4}).row()])
        assert "nobody has asked for" in wrong(store, told(), told("", finished=False))[0]
        with store.database.writing() as connection:
            connection.execute(sa.delete(ledger_table).where(ledger_table.c.id == "r9"))
            connection.execute(sa.update(ledger_days).values(neurons=700, entries=1, money=5, **USED))
        # A library that has sent it again and again has not seen the id that has the entry.
        assert wrong(store, told("r8", finished=False, key="k")) == []
        assert "no entry" in wrong(store, told("r8", key="k"))[0]
        # Cut off by its client or a fault: never more than there is.
        assert wrong(store, told(finished=False)) == []
        store.write([entry("r1.1").row(), entry("r2", status="left").row()])
        assert "charged for [6, 8]" in wrong(store, told(finished=False), told("r2", finished=False))[0]
        assert wrong(store, told(usage=(6, 8), neurons=1400), told("r2", finished=False)) == []
        assert "says {'left'}" in wrong(store, told(usage=(6, 8), neurons=1400), told("r2"))[0]
        with store.database.writing() as connection:
            connection.execute(sa.update(ledger_days).values(neurons=1))
        assert (
            "the day's sum of neurons" in wrong(store, told(usage=(6, 8), neurons=1400), told("r2", finished=False))[0]
        )


# -- the plan --------------------------------------------------------------------------------------------------------


def names(seed: int, count: int) -> list[str]:
    coming = plan(seed, list(FAULTS))
    return [next(coming)[0].fault.name for _ in range(count)]


def test_a_seed_gives_the_same_faults_each_before_any_again():
    size = len(FAULTS)
    assert names(5, 2 * size) == names(5, 2 * size) != names(6, 2 * size)
    assert len(set(names(5, size))) == size == len({fault.name for fault in FAULTS})
    assert list(plan(5, [])) == []


def test_some_come_in_twos_each_as_often_as_alone():
    coming = plan(5, list(FAULTS), 0.5)
    groups = [next(coming) for _ in range(60)]
    assert {len(group) for group in groups} == {1, 2}
    assert all(len({one.fault.name for one in group}) == len(group) for group in groups)
    assert not any(one.fault.alone for group in groups if len(group) == 2 for one in group)
    every = [one.fault.name for group in groups for one in group]
    size = len(FAULTS)
    assert len(set(every[:size])) == size and len(set(every[size : 2 * size])) >= len(every[size : 2 * size]) - 1
    again = plan(5, list(FAULTS), 0.5)
    assert [[one.fault.name for one in next(again)] for _ in range(60)] == [[o.fault.name for o in g] for g in groups]


def test_kills_come_at_seeded_moments_and_hit_all_that_the_issue_names():
    assert moments(5, 200, 10_000) == moments(5, 200, 10_000) != moments(6, 200, 10_000)
    due = moments(5, 200, 10_000)
    assert due == sorted(due) and len(due) == 200 and due[0] < 500 and 9_500 < due[-1] < 10_000
    assert {fault.name.partition("-")[0] for fault in selected("kills")} >= {"gateway", "store", "decode", "encoder"}


def test_unknown_faults_are_refused():
    left = [fault.name for fault in selected("all,-pool-killed,-server-lost")]
    assert len(left) == len(FAULTS) - 2 and "pool-killed" not in left
    assert selected("none") == [] and [f.name for f in selected("pool-killed")] == ["pool-killed"]
    with pytest.raises(SystemExit, match="no such fault: flood"):
        selected("flood")


def test_a_replay_names_no_password():
    options = argparse.Namespace(
        seed=3,
        minutes=2.0,
        clients=4,
        faults="all",
        every=0.0,
        together=0.2,
        database="postgresql://u:secret@h/d",
        kills=0,
        postgresql=False,
    )
    assert chaos.replay(options).startswith("python -m benchmarks chaos --seed 3 --minutes 2 ")
    assert "secret" not in chaos.replay(options)


# -- faults ----------------------------------------------------------------------------------------------------------


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


def test_connections_are_cut(peer):
    if why := network.can_reach_sockets():
        pytest.skip(why)
    process, ours = peer
    assert network.cut([os.getpid()], [process.pid]) == 1
    assert process.wait(60) == 0


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
    with pytest.raises(NotHere), cache_damaged(target(tmp_path), random.Random(0)):
        pass
    folder = tmp_path / "kv" / "0" / "ab"
    folder.mkdir(parents=True)
    for n in range(40):
        (folder / f"{n:02}.kv").write_bytes(b"x" * 100)
    with cache_damaged(target(tmp_path), random.Random(0)) as what:
        left = [path.read_bytes() for path in folder.iterdir()]
    damaged = 40 - left.count(b"x" * 100)
    assert what == f"{damaged} files" and 10 < damaged < 40
    # Files that an earlier fault has emptied are there as well.
    for seed in range(10):
        with cache_damaged(target(tmp_path), random.Random(seed)):
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


# -- on the stack ----------------------------------------------------------------------------------------------------

# What is over at once, and leaves the session's workers alone.
LIGHT = "tokens-cut,store-locked,tokens-lossy,pool-stopped,prefill-stopped,cpu-busy"


def shorter(ask: Ask) -> Ask:
    """With fewer tokens where any number of them is an answer."""
    limits = {name: 32 for name in ("max_tokens", "max_output_tokens") if ask.body.get(name, 0) > 32}
    return ask if ask.name in ("schema", "tool") else replace(ask, body={**ask.body, **limits})


def test_a_short_seed(stack, capsys, monkeypatch):
    monkeypatch.setattr(clients, "asks", lambda: [shorter(ask) for ask in asks()])
    few = [
        "--home",
        str(stack.home),
        "--clients",
        "3",
        "--minutes",
        "0.1",
        "--every",
        "0.2",
        "--recovery",
        "60",
        "--json",
    ]
    code = chaos.main([*few, "--faults", LIGHT, "--seed", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and not found["broken"], found["broke"]
    assert found["faults"] and found["counts"]["streams"] and not found["wrong"]
    # Every complete answer has its entry, with what its client was told.
    assert found["counts"]["entries"] >= found["counts"]["streams"]


@pytest.mark.slow
def test_all_faults(capsys):
    code = chaos.main(["--clients", "6", "--minutes", "8", "--recovery", "60", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, found["broke"]
