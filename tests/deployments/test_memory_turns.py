"""The memory broker and its tenants in one process: who comes up, who makes room, and what is remembered. Workers are
stand-ins here that hold what the test says; tests/e2e/test_memory_budget.py has real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deployments import memory_broker, tenancy
from deployments.memory_broker import MemoryBroker
from deployments.supervisor import Supervisor, WorkerLost
from deployments.tenancy import NoRoom, Tenancy, key_of, need_of
from serve_app import memory
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.catalog.need import Need
from serve_app.memory import Held
from serve_app.routing import memory as policy
from serve_app.worker.spec import WorkerSpec
from tests.waiting import until

MIB = 1 << 20
SPEC = WorkerSpec("a", "predictor", {"path": "x"}, "x", "x", memory_budget=100 * MIB, may_sleep=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody has to stay, and the machine has room; the broker is no actor here, whoever started Ray before."""
    monkeypatch.setattr(memory_broker.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(policy, "STAY_S", 0.0)
    monkeypatch.setattr(policy, "IDLE_S", 0.02)
    monkeypatch.setattr(memory, "spare_bytes", lambda: 1 << 40)
    monkeypatch.setattr(memory_broker, "LOOK_S", 0.02)
    monkeypatch.setattr(memory_broker, "HOLD_S", 0.1)
    monkeypatch.setattr(memory_broker, "SILENT_S", 0.0)


class World:
    """A broker, and replicas whose workers are up as long as ``up`` has them."""

    def __init__(self, home) -> None:
        self.home = home
        self.up: set[str] = set()
        self.most = 0
        self.needs: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        broker = MemoryBroker("node", str(self.home))
        self.broker = SimpleNamespace(turn=SimpleNamespace(remote=broker.turn), real=broker)

    def tenant(self, name: str, mib: int, *, spec: WorkerSpec = SPEC, likely: int | None = -1) -> Tenancy:
        need = Need(mib * MIB, mib * MIB if likely == -1 else likely)
        made = Tenancy(replace(spec, model=name), need, name)
        self.needs[name] = mib
        made._broker = self.broker
        world = self

        class Worker:
            ready, pid = False, 0

            async def wake(self) -> None:
                world.up.add(name)
                world.most = max(world.most, sum(world.needs[one] for one in world.up))
                await asyncio.sleep(0.01)
                self.ready, self.pid = True, os.getpid()

            async def sleep(self) -> None:
                self.ready, self.pid = False, 0
                await asyncio.sleep(0.01)
                world.up.discard(name)

        made.begin(Worker())
        return made


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "read_held", lambda pid: Held())
    made = World(tmp_path)
    monkeypatch.setattr(tenancy, "get_or_create_broker", lambda node, home: made.broker)
    monkeypatch.setattr(tenancy, "node_id", lambda: "node")
    return made


async def use(tenant: Tenancy, seconds: float = 0.0) -> None:
    async with asyncio.timeout(20), tenant.using():
        await asyncio.sleep(seconds)


async def test_idle_ones_leave_for_those_that_are_asked_for(world) -> None:
    tenants = [world.tenant(name, 40) for name in "abcd"]
    for _ in range(2):
        for tenant in tenants:
            await use(tenant)
    assert len(world.up) == 2 and world.most == 80
    await asyncio.gather(*(use(tenant, 0.05) for tenant in tenants for _ in range(3)))
    assert world.most == 80
    told = json.loads(await world.broker.real.shown())
    assert told["budget_bytes"] == 100 * MIB and told["wakes"] >= 8 and told["sleeps"] >= 6 and not told["closes"]
    assert {worker["model"] for worker in told["workers"] if worker["state"] == "up"} <= world.up


async def test_who_works_stays_and_the_other_is_told_what_it_waits_for(world) -> None:
    a, b = world.tenant("a", 60), world.tenant("b", 60)
    working = asyncio.ensure_future(use(a, 0.6))
    await until(lambda: "a" in world.up)
    asking = asyncio.ensure_future(use(b))
    await until(lambda: "waits for room" in b._told.why)
    assert world.up == {"a"} and "100 MiB" in b._told.why and "a has too much" in b._told.why
    await asyncio.gather(working, asking)
    assert world.most == 60


async def test_one_that_always_has_work_is_closed_when_another_has_waited_long(world, monkeypatch) -> None:
    monkeypatch.setattr(policy, "PATIENCE_S", 0.2)
    a, b = world.tenant("a", 60), world.tenant("b", 60)
    over = asyncio.Event()

    async def always() -> None:
        while not over.is_set():
            await use(a, 0.005)

    working = [asyncio.ensure_future(always()) for _ in range(2)]
    await until(lambda: "a" in world.up)
    await use(b)
    over.set()
    await asyncio.gather(*working)
    assert world.most == 60
    assert json.loads(await world.broker.real.shown())["closes"] >= 1


async def test_who_can_never_fit_is_refused_by_name(world) -> None:
    with pytest.raises(NoRoom, match=r"large can never be up.*101 MiB.*100 MiB.*SERVE_APP_MEMORY_BUDGET"):
        await use(world.tenant("large", 101))
    told = json.loads(await world.broker.real.shown())
    assert [worker["state"] for worker in told["workers"]] == ["never"]


async def test_pinned_ones_keep_their_room(world) -> None:
    pinned = world.tenant("pinned", 70, spec=replace(SPEC, may_sleep=False))
    await asyncio.wait_for(pinned.let_in(), 20)
    with pytest.raises(NoRoom, match="beside pinned, which never sleep"):
        await use(world.tenant("b", 40))
    await use(world.tenant("c", 30))
    with pytest.raises(NoRoom, match="second can never be up"):
        await asyncio.wait_for(world.tenant("second", 40, spec=replace(SPEC, may_sleep=False)).let_in(), 20)


async def test_one_more_of_a_pinned_kind_waits_and_nothing_is_kept_for_it(world) -> None:
    kept = replace(SPEC, may_sleep=False)
    first, second = world.tenant("first", 60, spec=kept), world.tenant("second", 60, spec=kept)
    second._spec = first._spec
    await asyncio.wait_for(first.let_in(), 20)
    waiting = asyncio.ensure_future(second.let_in())
    await use(world.tenant("b", 40))
    await until(lambda: "waits for room" in second._told.why)
    assert not waiting.done()
    waiting.cancel()


async def test_a_short_machine_delays_a_start(world, monkeypatch) -> None:
    monkeypatch.setattr(memory, "spare_bytes", lambda: 30 * MIB)
    a = world.tenant("a", 40)
    asking = asyncio.ensure_future(use(a))
    await until(lambda: "short of memory" in a._told.why)
    assert not world.up
    monkeypatch.setattr(memory, "spare_bytes", lambda: 50 * MIB)
    await asking


async def test_what_answers_do_not_need_comes_when_there_is_room(world) -> None:
    draft = world.tenant("draft", 60, spec=replace(SPEC, stage="draft"))
    with pytest.raises(LookupError):
        await use(draft)
    await until(lambda: "draft" in world.up)
    await use(draft)
    other = world.tenant("a", 60)
    await use(other)
    with pytest.raises(LookupError):
        await use(draft)
    await asyncio.sleep(0.3)
    assert world.up == {"a"}


async def test_a_broker_that_was_lost_knows_all_again(world, monkeypatch) -> None:
    tenants = [world.tenant(name, 40) for name in "abc"]
    await use(tenants[0])
    await use(tenants[1])
    world.restart()
    world.broker.real._waits_until = asyncio.get_running_loop().time() + 0.5
    for tenant in tenants:
        tenant._broker = world.broker
    await use(tenants[2])
    assert world.most == 80 and len(world.up) == 2


async def test_what_has_been_measured_counts_and_is_remembered(world, monkeypatch) -> None:
    """An unknown size has the machine for itself once."""
    monkeypatch.setattr(memory, "read_held", lambda pid: Held(15 * MIB, 20 * MIB))
    monkeypatch.setattr(memory_broker, "SAMPLE_S", 0.0)
    a = world.tenant("a", 10, likely=None)
    await use(a)
    broker = world.broker.real
    assert json.loads(await broker.shown())["workers"][0]["needs_bytes"] in (100 * MIB, 36 * MIB)
    file = world.home / "memory.json"
    await until(file.exists)
    key = key_of(replace(SPEC, model="a"))
    assert json.loads(file.read_text()) == {key: 20 * MIB + memory_broker.MARGIN_BYTES}
    assert file.stat().st_mode & 0o077 == 0
    assert MemoryBroker("node", str(world.home))._known == json.loads(file.read_text())
    file.write_text("[1, 2]")
    assert MemoryBroker("node", str(world.home))._known == {}


async def test_what_may_come_with_use_keeps_nobody_out_who_was_seen_to_fit(world, monkeypatch) -> None:
    monkeypatch.setattr(memory, "read_held", lambda pid: Held(70 * MIB, 70 * MIB))
    monkeypatch.setattr(memory_broker, "SAMPLE_S", 0.0)
    a, b = world.tenant("a", 10, likely=None), world.tenant("b", 40)
    a._need = replace(a._need, grows=60 * MIB)
    for _ in range(2):
        await use(a, 0.2)
        await use(b)
    known = world.broker.real._known
    assert known[key_of(replace(SPEC, model="a"))] == 100 * MIB


async def test_a_replica_that_is_gone_has_no_room(world, monkeypatch) -> None:
    a, b = world.tenant("a", 60), world.tenant("b", 60)
    async with a.using():
        a._task.cancel()
        monkeypatch.setattr(memory_broker, "_lives", lambda pid: False)
        world.up.discard("a")
        await use(b)


async def test_a_call_that_waits_too_long_is_refused(world, monkeypatch) -> None:
    monkeypatch.setattr(tenancy, "WAIT_S", 0.3)
    async with world.tenant("a", 60).using():
        with pytest.raises(NoRoom, match="b waits for room"):
            await use(world.tenant("b", 60))


async def test_a_worker_is_reached_without_being_used() -> None:
    """Counters and health checks neither wake a worker nor keep it up; who does without one is told so."""

    class Asleep:
        sleeps = True

        def begin(self, sleeper) -> None: ...

        def using(self):
            raise LookupError("asleep")

    supervisor = Supervisor(lambda: None, lambda worker: None, tenancy=Asleep())
    await supervisor.begin()
    assert (await supervisor.counters("draft")).silent and await supervisor.check(lambda worker: 1 / 0) is None
    with pytest.raises(WorkerLost):
        await supervisor.call(lambda worker: 1 / 0)


def test_an_estimate_is_above_what_the_files_have() -> None:
    folder = PROJECT_ROOT / "checkpoints" / "pico-sentiment"
    spec = replace(SPEC, weights={"path": str(folder)}, kv_cache_bytes=10 * MIB)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    need = need_of(spec)
    assert need.least < need.likely and need.likely > 2 * size + 10 * MIB and need.grows == 10 * MIB
    assert need_of(replace(spec, weights={"repo": "nobody/nothing"})).likely is None
    assert need_of(replace(spec, device="cuda")) == Need(0, 0)


def test_what_this_process_holds_and_the_machine_has_left() -> None:
    held = memory.read_held(os.getpid())
    assert 20 * MIB < held.now <= held.most < 1 << 40
    assert memory.read_held(1 << 30) == Held()
    assert 0 < memory.spare_bytes() < 1 << 50
