"""Who works on a batch when it comes: a runner that is called, and this process until that is up."""

from __future__ import annotations

import asyncio

from serve_app.gateway import runners as module
from serve_app.gateway.runners import Runners
from serve_app.state.state import State
from tests.waiting import until


class Beginner:
    """Counts how often it has been begun."""

    begun = 0

    async def run(self) -> None:
        type(self).begun += 1

    async def drain(self) -> None: ...

    def wake(self) -> None: ...

    def release(self) -> None: ...


async def test_a_gateway_begins_itself_only_where_no_runner_is_warm(tmp_path):
    state, calls = State(tmp_path, "local", ()), 0
    runners, Beginner.begun = Runners(state), 0
    lost = False

    async def work() -> None:
        nonlocal calls
        calls += 1
        if lost:
            raise RuntimeError("it was lost")

    runners.work, runners.here = work, Beginner
    runners.start()
    try:
        for number in (1, 2, 3):
            lost = number == 3
            runners._worked_at = float("-inf") if lost else runners._worked_at
            runners.wake()
            await until(lambda number=number: calls >= number and runners._working.done())
        assert Beginner.begun == 2
    finally:
        runners.close()
        state.close()
        await asyncio.sleep(0)


class Draining(Beginner):
    """Works until it is ended; what is under way takes a moment."""

    told: list[str]

    async def run(self) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            self.told.append("ended")

    async def drain(self) -> None:
        await asyncio.sleep(0.05)
        self.told.append("drained")


async def test_what_a_gateway_has_begun_may_end_before_it_leaves_the_rest_to_a_runner(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BEGIN_S", 0.05)
    state, Draining.told = State(tmp_path, "local", ()), []
    runners = Runners(state)
    runners.work, runners.here = lambda: asyncio.sleep(600), Draining
    runners.start()
    try:
        runners.wake()
        await until(lambda: runners._beginning is not None and runners._beginning.done())
        assert Draining.told == ["drained", "ended"] and runners._beginner is None
    finally:
        runners.close()
        state.close()
        await asyncio.sleep(0)
