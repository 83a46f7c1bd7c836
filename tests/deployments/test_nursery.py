"""Planted workers: adopted once, by whom they were planted for, and gone when that process goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import ray

from deployments import nursery
from serve_app.worker.spec import WorkerSpec
from tests import tiny
from tests.e2e.test_faults import wait_for

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.skipif(not nursery.available(), reason="needs Linux"),
]


@pytest.fixture
def spec(tmp_path):
    path = tiny.write_checkpoint(tmp_path / "tiny", "llama")
    where = {"weights": {"path": str(path)}, "source": str(path), "home": str(tmp_path)}
    return WorkerSpec(model="planted", stage="decode", dtype="float32", cpu_threads=1, **where)


def is_gone(worker) -> bool:
    try:
        ray.get(worker.stats.remote(), timeout=120)
    except ray.exceptions.RayError:
        return True
    return False


async def test_one_replica_gets_it_and_it_ends_with_that_replica(spec):
    [planted] = nursery.plant([spec])
    replica = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        other = WorkerSpec(**{**{f: getattr(spec, f) for f in spec.__slots__}, "max_num_seqs": 7})
        assert not await planted.adopt.remote(other, replica.pid)
        assert await planted.adopt.remote(spec, replica.pid)
        # The next replica of the same stage starts a worker of its own.
        assert await nursery.adopt(spec) is None
        assert not is_gone(planted)
    finally:
        replica.kill()
        replica.wait()
    wait_for(lambda: is_gone(planted), 90)
    assert await nursery.adopt(spec) is None


@pytest.mark.slow
async def test_its_end_is_no_accident_to_ray(spec, capfd):
    """Ray tells the driver of workers that die: of those that nobody meant to end."""
    pids = []
    for name, end in (
        ("ends", lambda pid, parent: parent.kill()),
        ("dies", lambda pid, _: os.kill(pid, signal.SIGKILL)),
    ):
        spec.model = name
        [planted] = nursery.plant([spec])
        parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            assert await planted.adopt.remote(spec, parent.pid)
            pids.append(await planted.ready.remote())
            end(pids[-1], parent)
            wait_for(lambda planted=planted: is_gone(planted), 90)
        finally:
            parent.kill()
            parent.wait()
    told = ""

    def of_the_second() -> bool:
        nonlocal told
        told += capfd.readouterr().out
        return f"Worker PID: {pids[1]}" in told

    wait_for(of_the_second, 90)
    assert f"Worker PID: {pids[0]}" not in told


async def test_one_that_could_not_load_is_nobodys(spec):
    spec.weights = {"path": "/nonexistent"}
    spec.model = "broken"
    held = nursery.plant([spec])
    assert await nursery.adopt(spec) is None
    assert is_gone(held[0])


async def test_stages_with_several_nodes_or_gpus_do_not_look(spec):
    spec.several_nodes = True
    assert await nursery.adopt(spec) is None
