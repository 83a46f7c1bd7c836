"""A pool on a node that nobody serves on lets the node go; one on the head stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray

from serve_app.kv import vacancy
from serve_app.kv.nodes import may_go, object_store_bytes, pool_name
from serve_app.kv.pool import get_or_create_pool
from serve_app.kv.vacancy import leave_when_empty, occupied


async def test_it_leaves_once_nobody_has_served_for_a_while(monkeypatch) -> None:
    monkeypatch.setattr(vacancy, "LOOK_S", 0.01)
    monkeypatch.setattr(vacancy, "EMPTY_S", 0.05)
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


async def test_a_pool_ends_for_good(ray_cluster, monkeypatch) -> None:
    """And is another one when somebody serves there again."""
    node = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr("serve_app.kv.pool.pool_name", lambda node_id: f"kvpool:leaves:{node_id}:{os.getpid()}")
    pool = get_or_create_pool(node)
    first = await pool.stats.remote()
    pool.leave.remote()

    async def gone() -> bool:
        try:
            await pool.stats.remote()
        except ray.exceptions.RayActorError:
            return True
        return False

    for _ in range(100):
        if await gone():
            break
    else:
        pytest.fail("the pool is there still")
    again = get_or_create_pool(node)
    assert (await again.stats.remote()).keys() == first.keys()
    ray.kill(again)
    assert pool_name(node) == f"kvpool:{node}"
