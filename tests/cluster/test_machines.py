"""Several nodes with networks, processes, disks and stores of their own on this machine: see
``machines/network.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.machines.fetches import CHEAPER, LENGTH, TOKEN_BYTES
from tests.cluster.machines.network import Machine, Network, network, why_not
from tests.cluster.machines.ray_nodes import RayCluster
from tests.cluster.machines.serving import APPLICATION, PATIENCE_S, Clients, Served, seen
from tests.waiting import until

# As many as a busy machine has had in so many seconds, if that is less; and so many between two steps.
BETWEEN, STREAMS, MOST_S = 400, 10_000, float(os.environ.get("STREAMS_SECONDS", "1200"))
LONG = 3900  # tokens of a long stream: nearly what the model's context has room for


@pytest.fixture
def switch() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.mark.slow
def test_machines_have_nothing_in_common_but_the_switch(switch: Network) -> None:
    first, second = switch.machine("first"), switch.machine("second")
    serve = "import socket; s = socket.create_server(('', 7000)); s.accept()[0].sendall(b'x' * 10**6)"
    running = first.start(sys.executable, "-c", serve, log=switch.folder / "log")
    read = f"""
import socket, time
while True:
    try:
        s = socket.create_connection(({first.address!r}, 7000), 1)
    except ConnectionRefusedError:
        time.sleep(0.1)
        continue
    total = 0
    while got := s.recv(65536):
        total += len(got)
    print(total)
    break
"""
    before = first.sent(), second.received()
    assert second.run(sys.executable, "-c", read).strip() == "1000000"
    assert 10**6 < first.sent() - before[0] < 1.2 * 10**6 > second.received() - before[1] > 10**6
    assert running.wait(20) == 0
    first.run("touch", "/here", "/tmp/here", "/dev/shm/here")
    assert "No such file" in second.run("bash", "-c", "ls /here /tmp/here /dev/shm/here 2>&1; true")
    assert first.run("bash", "-c", "echo $$").strip() != str(first.init)
    sleeper = second.start("sleep", "1000", log=switch.folder / "log")
    second.lose()
    assert not second.running and sleeper.wait(20) != 0
    with pytest.raises(RuntimeError):
        first.run(sys.executable, "-c", f"import socket; socket.create_connection(({second.address!r}, 22), 2)")


@pytest.mark.slow
def test_chunks_travel_between_machines_and_only_where_that_is_sooner(switch: Network) -> None:
    """See ``machines/fetches.py``."""
    cluster = RayCluster(switch)
    for name in "ab":
        cluster.add(name)
    said = cluster.run(sys.executable, "-m", "tests.cluster.machines.fetches", seconds=PATIENCE_S)
    found = json.loads(said.strip().splitlines()[-1])
    assert found["addresses"] == [cluster.network.named(name).address for name in "ab"]
    print(json.dumps(found, indent=1))
    assert len(found["handed_over"]) == 4 and len(found["fetched"]) == 4 and len(found["slow"]) >= 3
    assert found["right"] == 4 + 1 + 4 + len(found["slow"]) + len(found["fast_again"])
    for one in found["handed_over"]:
        assert one["path"]["prefilled"] == LENGTH - 1
    for one in found["fetched"]:
        assert one["path"]["remote"] == LENGTH - 1
    for one in found["handed_over"] + found["fetched"]:
        # All of it came over the cable, once: beside it headers, and what nodes say to each other anyway.
        assert one["path"]["bytes"] >= (LENGTH - 1) * TOKEN_BYTES
        assert one["path"]["bytes"] < one["sent"] < 1.1 * one["path"]["bytes"] + 500_000
    assert found["fast_again"][-1]["path"]["remote"] == LENGTH - 1
    # Nothing but such talk where computing was chosen.
    chosen = [
        one for one, before in zip(found["slow"][1:], found["slow"], strict=False) if cheaper(one) > cheaper(before)
    ]
    assert cheaper(found["slow"][-1]) == 3 and len(chosen) >= 2
    assert all(one["path"]["computed"] == LENGTH and one["sent"] < 500_000 for one in chosen)


def cheaper(one: dict[str, Any]) -> int:
    return int(one["costs"]["decisions"].get(CHEAPER, 0))


@pytest.mark.slow
async def test_a_node_is_lost_under_streams_without_a_word(switch: Network) -> None:
    cluster = await asyncio.to_thread(Served, switch, 3, decode=2, prefill=1)
    expected = await asyncio.to_thread(cluster.expected, 200)
    clients = Clients(cluster.url, expected, 200)
    asking = asyncio.create_task(clients.run(12))
    await until(lambda: clients.done >= 12, PATIENCE_S)

    def victim() -> Machine:
        """With a worker that decodes and without the gateway."""
        nodes = [switch.named(name) for name in "abc"]
        with_decode = [one for one in nodes if cluster.holds(one, f"{APPLICATION}:Decode")]
        return next(one for one in with_decode if not cluster.holds(one, "gateway:Gateway"))

    lost = await asyncio.to_thread(victim)
    node = await asyncio.to_thread(cluster.node_id, lost)
    # While it has streams.
    await seen(lambda: any(w["node"] == node and w["running"] > 1 for w in cluster.workers()))
    hit = set(clients.under_way)
    await asyncio.to_thread(lost.lose)
    told = clients.done
    await until(lambda: clients.done >= told + 40 and not hit & clients.under_way, PATIENCE_S)
    had = [await asyncio.to_thread(cluster.lost, one) for one in hit]
    print(json.dumps({**clients.counted(), "tokens that lost streams had": [n for n in had if n is not None]}))
    # Another machine comes in its place, and is used.
    await asyncio.to_thread(cluster.add, "d")
    await seen(lambda: cluster.holds(switch.named("d"), f"{APPLICATION}:Decode"))
    await seen(lambda: len(cluster.workers()) == 3)
    told = clients.done
    await until(lambda: clients.done >= told + 24, PATIENCE_S)
    clients.stop()
    await asking
    print(json.dumps(clients.counted()))
    assert not clients.wrong and clients.right >= 76
    # Some had begun there, and went on elsewhere in the middle.
    assert sum(1 for tokens in had if tokens) >= 1


@pytest.mark.slow
async def test_no_stream_is_cut_while_workers_and_a_node_are_taken_away(switch: Network) -> None:
    """Short streams without a pause and a few long ones, while half of the workers go and come again and again, and a
    node is drained. Serve gives a replica 20 seconds for what it has; long streams have more to say than that.
    """
    cluster = await asyncio.to_thread(Served, switch, 2, decode=2)
    expected = await asyncio.to_thread(cluster.expected, 8)
    clients = Clients(cluster.url, expected, 8)
    lasting = Clients(cluster.url, await asyncio.to_thread(cluster.expected, LONG, 2), LONG)
    asking = [asyncio.create_task(clients.run(16)), asyncio.create_task(lasting.run(3))]
    began, steps = time.monotonic(), 0
    # Ids of long streams that ran as a worker was about to go.
    met: set[str] = set()

    async def workers(count: int) -> None:
        await seen(lambda: len(cluster.workers()) == count)

    async def scale(replicas: int) -> None:
        nonlocal steps
        met.update(lasting.under_way if replicas == 1 else ())
        await asyncio.to_thread(cluster.scale, replicas)
        await workers(replicas)
        steps += 1

    async def drain() -> None:
        """The node with a worker and without the gateway, once there is another for it."""
        going = next(
            one for one in switch.machines if one.running and cluster.holds(one, f"{APPLICATION}:Decode")
            and not cluster.holds(one, "gateway:Gateway")
        )  # fmt: skip
        await asyncio.to_thread(cluster.add, "more")
        await until(lambda: lasting.under_way, PATIENCE_S)
        met.update(lasting.under_way)
        await asyncio.to_thread(cluster.drain, going)
        await seen(lambda: cluster.holds(switch.named("more"), f"{APPLICATION}:Decode"))
        await seen(lambda: not cluster.holds(going, f"{APPLICATION}:Decode"))
        going.stop()

    async def went_on() -> list[int]:
        """How many tokens the long streams had whose worker ended under them."""
        had = [await asyncio.to_thread(cluster.lost, one) for one in met - lasting.under_way]
        return [tokens for tokens in had if tokens is not None]

    await workers(2)
    await drain()
    while (clients.done < STREAMS or not await went_on()) and time.monotonic() < began + MOST_S:
        for replicas in (1, 2):
            await scale(replicas)
            # A worker that starts takes the cores, so that few streams run meanwhile.
            told = clients.done + BETWEEN
            await seen(lambda told=told: clients.done >= told)
    for each in (clients, lasting):
        each.stop()
    await asyncio.gather(*asking)
    had, took = await went_on(), [round(s, 1) for s in sorted(lasting.took_s)]
    print(json.dumps({**clients.counted(), "steps": steps, "seconds": round(time.monotonic() - began)}))
    print(json.dumps({"long": lasting.counted(), "met": len(met), "went on after tokens": had, "took_s": took}))
    assert not clients.wrong and not clients.refused and steps >= 4
    assert clients.right >= min(STREAMS, 1000)
    assert not lasting.wrong and not lasting.refused and lasting.right >= 3
    # Some were longer than a replica has to end them, and went on elsewhere in the middle.
    assert all(had)
    assert had


@pytest.mark.slow
async def test_requests_stay_in_their_zone_while_it_can_serve(switch: Network) -> None:
    zones = {"a": "europe/one", "b": "europe/two"}
    cluster = await asyncio.to_thread(Served, switch, 2, tuple(zones.values()), decode=2)
    expected = await asyncio.to_thread(cluster.expected, 60)
    await seen(lambda: len(cluster.workers()) == 2 and all(w["zone"] for w in cluster.workers()))
    workers = {one["replica"]: one["zone"] for one in await asyncio.to_thread(cluster.workers)}
    assert sorted(workers.values()) == sorted(zones.values())
    home = next(zone for name, zone in zones.items() if cluster.holds(switch.named(name), "gateway:Gateway"))
    before = Counter(await asyncio.to_thread(cluster.decoded))

    async def ask(clients: int, streams: int) -> Counter[str]:
        """Tokens generated meanwhile, by zone."""
        asked = Clients(cluster.url, expected, 60)
        asking = asyncio.create_task(asked.run(clients))
        await until(lambda: asked.done >= streams, PATIENCE_S)
        asked.stop()
        await asking
        assert not asked.wrong
        nonlocal before
        now = Counter(await asyncio.to_thread(cluster.decoded))
        made, before = now - before, now
        print(json.dumps({**asked.counted(), "tokens": dict(made), "gateway": home}))
        return made

    assert set(await ask(1, 12)) == {home}
    # More than its worker has places for: the other zone helps.
    assert set(await ask(40, 120)) == set(zones.values())
