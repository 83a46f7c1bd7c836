"""Actors of a node that nobody serves on let the node go; those on the head stay."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray

from serve_app.kv.nodes import object_store_bytes
from serve_app.ray_private import node_actors
from serve_app.ray_private.node_actors import leave_when_empty, may_go, occupied


async def test_it_leaves_once_nobody_has_served_for_a_while(monkeypatch) -> None:
    monkeypatch.setattr(node_actors, "LOOK_S", 0.01)
    monkeypatch.setattr(node_actors, "EMPTY_S", 0.05)
    seen, left = iter([True, False, False, True] + [False] * 100), []
    looked = []

    def serving() -> bool:
        looked.append(next(seen))
        return looked[-1]

    await leave_when_empty(lambda: left.append(len(looked)), serving)
    assert left == [9], "five looks in a row found nobody"


def test_a_process_that_serves_is_found_by_its_title() -> None:
    sleep = "import time; print(flush=True); time.sleep(60)"
    before = occupied()
    titled = subprocess.Popen(["ray::EngineWorker", "-c", sleep], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        titled.stdout.readline()
        assert occupied()
    finally:
        titled.kill()
        titled.wait()
    assert occupied() == before or not before


def test_the_pool_of_the_only_node_stays(ray_cluster) -> None:
    node = ray.get_runtime_context().get_node_id()
    assert not may_go(node) and not may_go("nowhere") and object_store_bytes(node) > 0 == object_store_bytes("nowhere")


@ray.remote(num_cpus=0)
class Owner:
    """Ends as a pool does that owns chunks to which others have references."""

    def __init__(self) -> None:
        self._held = ray.put(b"x" * 1_000_000)

    async def give(self) -> list[ray.ObjectRef]:
        return [self._held]

    async def leave(self) -> None:
        node_actors.LOOK_S = node_actors.EMPTY_S = 0.01
        self._leaving = node_actors.leaving(lambda: False)


async def test_who_owns_what_others_hold_ends_at_once_and_for_good(ray_cluster) -> None:
    owner = Owner.options(max_restarts=-1, max_concurrency=10).remote()
    [held] = await owner.give.remote()
    owner.leave.remote()
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            await owner.give.remote()
    assert held is not None
