"""A worker that dies is replaced in place; calls in flight say so, later ones wait, and a crash loop is given up."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import ray

from deployments import pulse
from deployments.supervisor import Supervisor, WorkerLost
from serve_app.activity import read_activity
from serve_app.wire.replicas import Pulse

pytestmark = pytest.mark.usefixtures("ray_cluster")


@ray.remote(num_cpus=0, max_concurrency=8)
class Worker:
    def __init__(self, number: int, dies_at_birth: bool = False) -> None:
        if dies_at_birth:
            os._exit(1)
        self.number = number

    async def pid(self) -> tuple[int, int]:
        return self.number, os.getpid()

    async def pulse(self) -> bytes:
        return Pulse(os.getpid()).encode()

    async def compute(self, seconds: float) -> str:
        """Holds the interpreter: nobody is answered meanwhile."""
        until = time.process_time() + seconds
        while time.process_time() < until:
            sum(range(1_000_000))
        return "computed"

    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"


def supervised(dying_from: int = 1 << 30) -> Supervisor:
    started: list[int] = []

    def start():
        started.append(len(started))
        return Worker.remote(started[-1], started[-1] >= dying_from)

    return Supervisor(start, lambda worker: worker.pid.remote())


async def test_calls_in_flight_are_told_and_later_ones_wait_for_the_successor():
    supervisor = supervised()
    await supervisor.begin()
    number, pid = await supervisor.call(lambda w: w.pid.remote())
    assert number == 0
    flying = asyncio.ensure_future(supervisor.call(lambda w: w.sleep.remote(30)))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await flying
    assert await supervisor.check(lambda w: w.pid.remote()) is None  # loading is no illness
    number, successor = await asyncio.wait_for(supervisor.call(lambda w: w.pid.remote()), 60)
    assert number == 1 and successor != pid
    assert await supervisor.check(lambda w: w.pid.remote()) == (1, successor)


async def test_a_health_check_finds_the_loss_without_any_request():
    supervisor = supervised()
    await supervisor.begin()
    _, pid = await supervisor.call(lambda w: w.pid.remote())
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        # None while the next one starts.
        while (found := await supervisor.check(lambda w: w.pid.remote())) in (None, (0, pid)):
            await asyncio.sleep(0.05)
    assert found[0] == 1


async def test_a_crash_loop_is_given_up_and_the_health_check_says_so():
    supervisor = supervised(dying_from=1)
    await supervisor.begin()
    _, pid = await supervisor.call(lambda w: w.pid.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await supervisor.call(lambda w: w.sleep.remote(30))

    async def gives_up():
        while True:
            await supervisor.check(lambda w: w.pid.remote())
            await asyncio.sleep(0.2)

    with pytest.raises(RuntimeError, match="keep dying"):
        await asyncio.wait_for(gives_up(), 120)


async def test_the_first_start_failing_is_the_callers_matter():
    with pytest.raises(ray.exceptions.RayActorError):
        await supervised(dying_from=0).begin()


async def test_a_worker_that_hangs_is_replaced_and_one_that_computes_is_left_alone(monkeypatch):
    monkeypatch.setattr(pulse, "PERIOD_S", 0.2)
    monkeypatch.setattr(pulse, "LOOK_S", 0.2)
    monkeypatch.setattr(pulse, "SILENT_S", 1.0)
    supervisor = supervised()
    await supervisor.begin()
    # Twice as long as a silent worker is given, counted in seconds of computing.
    assert await supervisor.call(lambda w: w.compute.remote(2.0)) == "computed"
    number, pid = await supervisor.call(lambda w: w.pid.remote())
    assert number == 0
    flying = asyncio.ensure_future(supervisor.call(lambda w: w.sleep.remote(3600)))
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(flying, 60)
    number, successor = await asyncio.wait_for(supervisor.call(lambda w: w.pid.remote()), 60)
    assert number == 1 and successor != pid
    async with asyncio.timeout(60):  # and says nothing any more
        while read_activity(pid) is not None:
            await asyncio.sleep(0.05)
