"""Large bodies are looked through one at a time, and who sends many waits behind himself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serve_app.gateway.http.in_turns import InTurns


class Work:
    """Pieces that wait until they are let go; ``begun`` in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.at_once = self.most = 0
        self.go = threading.Semaphore(0)

    def __call__(self, name: str) -> str:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.begun.append(name)
        assert self.go.acquire(timeout=60)
        self.at_once -= 1
        if name == "bad":
            raise ValueError(name)
        return name


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_one_at_a_time_and_accounts_in_turns():
    turns, work = InTurns(), Work()
    many = [asyncio.ensure_future(turns.run("a", work, f"a{n}")) for n in range(4)]
    await until(lambda: work.begun)
    one = asyncio.ensure_future(turns.run("b", work, "b"))
    await asyncio.sleep(0)
    work.go.release(5)
    assert await asyncio.gather(*many, one) == ["a0", "a1", "a2", "a3", "b"]
    assert work.begun == ["a0", "a1", "b", "a2", "a3"] and work.most == 1
    work.go.release()
    assert await turns.run("c", work, "later") == "later"


async def test_failures_and_clients_that_leave_keep_nobody_waiting():
    turns, work = InTurns(), Work()
    gone = asyncio.ensure_future(turns.run("a", work, "gone"))
    await until(lambda: work.begun)
    bad = asyncio.ensure_future(turns.run("a", work, "bad"))
    left = asyncio.ensure_future(turns.run("b", work, "left"))
    last = asyncio.ensure_future(turns.run("c", work, "last"))
    await asyncio.sleep(0)
    gone.cancel()
    left.cancel()
    await asyncio.wait([gone, left])
    assert work.begun == ["gone"]  # its thread still has the interpreter
    work.go.release(3)
    with pytest.raises(ValueError, match="bad"):
        await bad
    assert await last == "last"
    assert work.begun == ["gone", "bad", "last"] and work.most == 1
    # One that has just been given its turn and leaves passes it on.
    first = asyncio.ensure_future(turns.run("a", work, "first"))
    await until(lambda: "first" in work.begun)
    second = asyncio.ensure_future(turns.run("a", work, "second"))
    third = asyncio.ensure_future(turns.run("a", work, "third"))
    await asyncio.sleep(0)
    first_done = asyncio.Event()
    first.add_done_callback(lambda _: (second.cancel(), first_done.set()))
    work.go.release(3)
    await first_done.wait()
    assert await third == "third"
    await asyncio.wait([second])
    assert work.most == 1
