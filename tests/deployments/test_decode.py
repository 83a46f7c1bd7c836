"""A decode replica whose draft model is late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from deployments.decode import Decode
from deployments.stage import EngineStage
from deployments.supervisor import Supervisor


class Worker:
    """An engine worker's handle, as far as drafts are concerned. ``drafts``: the names it was told."""

    def __init__(self) -> None:
        self.drafts: list[str] = []
        self.told = asyncio.Event()
        self.ready = SimpleNamespace(remote=self._ready)
        self.needs_draft = SimpleNamespace(remote=self._needs_draft)
        self.use_draft = SimpleNamespace(remote=self._use_draft)

    async def _ready(self) -> int:
        return 1

    async def _needs_draft(self) -> bool:
        return not self.drafts

    async def _use_draft(self, name: str) -> None:
        self.drafts.append(name)
        self.told.set()


class Draft:
    """The Draft deployment's handle: it has a name once ``up``, and may fail instead."""

    def __init__(self) -> None:
        self.asked = 0
        self.up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.worker_name = SimpleNamespace(remote=self._name)

    async def _name(self) -> str:
        self.asked += 1
        return await asyncio.shield(self.up)


@pytest.fixture
async def parts():
    worker, draft = Worker(), Draft()
    kind = Decode.func_or_class
    replica = kind.__new__(kind)
    EngineStage.__init__(replica)
    replica._prefill, replica._draft = None, draft
    replica.supervisor = Supervisor(lambda: worker, replica.greet)
    await replica.supervisor.begin()
    yield replica, worker, draft
    replica._connecting.cancel()


async def test_health_checks_do_not_wait_for_the_draft(parts):
    replica, worker, draft = parts
    async with asyncio.timeout(60):
        for _ in range(3):
            await replica.check_health()
        assert not worker.drafts and draft.asked == 1
        draft.up.set_result("draft-1")
        await worker.told.wait()
        await replica.check_health()
    assert worker.drafts == ["draft-1"]


async def test_a_draft_that_failed_is_asked_again(parts):
    replica, worker, draft = parts
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
        draft.up.set_exception(RuntimeError("it could not load"))
        await replica._connecting
        draft.up = asyncio.get_running_loop().create_future()
        draft.up.set_result("draft-2")
        await replica.check_health()
        await worker.told.wait()
    assert worker.drafts == ["draft-2"] and draft.asked == 2
