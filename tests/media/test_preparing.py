"""Whose inputs are prepared when: accounts in turns, long ones apart, and nobody holds up anybody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from serve_app.media.decoder import Interrupted, interrupted
from serve_app.media.preparing import LONG, QUICK, Full, Lane, Preparing
from tests.waiting import until

A, B, C = b"a", b"b", b"c"
NEVER = 1e6


class Files:
    """What is prepared: each file takes until it is told to end, or until it is interrupted, as a decoder's does."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.begun: list[str] = []
        self.stopped: list[str] = []

    def slow(self, name: str) -> Callable[[], str]:
        def prepare() -> str:
            self.begun.append(name)
            stop = interrupted.get()
            assert stop is not None
            while not self.over.wait(0.005):
                if stop.is_set():
                    self.stopped.append(name)
                    raise Interrupted
            return name

        return prepare

    def quick(self, name: str) -> Callable[[], str]:
        def prepare() -> str:
            self.begun.append(name)
            return name

        return prepare


@pytest.fixture
def files() -> Iterator[Files]:
    made = Files()
    yield made
    made.over.set()


def asked(preparing: Preparing, account: bytes, prepare: Callable[[], str], size: int = 1) -> asyncio.Future[str]:
    return asyncio.ensure_future(preparing.run(account, size, prepare))


async def test_accounts_wait_in_turns():
    """What a flood has sent first waits behind what others send later."""
    lane, entered = Lane(2, 2), []

    async def enter(account: bytes) -> None:
        await lane.enter(account)
        entered.append(account)

    assert lane.take(A) and lane.take(A) and not lane.take(B)
    waiting = [asyncio.ensure_future(enter(account)) for account in (A, A, A, B, C, A)]
    await asyncio.sleep(0)
    waiting[4].cancel()  # it goes meanwhile
    for account in (A, A, A, B, A, A, A):
        lane.leave(account)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert entered == [A, B, A, A, A]
    assert not lane._held and not lane._waiting and lane._free == 2


async def test_long_files_of_two_accounts_hold_up_nobody_else(files):
    preparing = Preparing(quick_s=0.01)
    slow = [asked(preparing, account, files.slow(f"{account!r}{n}")) for n in range(4) for account in (A, B)]
    await until(lambda: len(files.begun) >= LONG)
    for n in range(20):
        assert await asyncio.wait_for(preparing.run(C, 1, files.quick(f"c{n}")), 60) == f"c{n}"
    assert not any(one.done() for one in slow)
    # Who had begun where others needed the place begins anew, and everything is prepared in the end.
    assert files.stopped
    files.over.set()
    assert await asyncio.gather(*slow) == [f"{account!r}{n}" for n in range(4) for account in (A, B)]


async def test_alone_an_account_has_all_quick_places_and_nothing_is_stopped(files):
    preparing = Preparing(quick_s=0.01)
    slow = [asked(preparing, A, files.slow(str(n))) for n in range(5)]
    await until(lambda: len(files.begun) == QUICK + 1)  # one of them is among the long ones
    await asyncio.sleep(0.05)
    assert not files.stopped and len(files.begun) == QUICK + 1
    files.over.set()
    assert await asyncio.gather(*slow) == list("01234")


@pytest.mark.parametrize("quick_s", [0.01, NEVER])
async def test_who_leaves_ends_the_work_and_frees_the_place(files, quick_s):
    preparing = Preparing(quick_s=quick_s)
    slow = [asked(preparing, A, files.slow(str(n))) for n in range(QUICK + LONG + 3)]
    await until(lambda: len(files.begun) >= QUICK)
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await until(lambda: len(files.stopped) == len(files.begun))
    for account in (A, B):
        found = [asked(preparing, account, files.quick(str(n))) for n in range(8)]
        assert await asyncio.wait_for(asyncio.gather(*found), 60) == [str(n) for n in range(8)]
    await until(lambda: not (preparing._bytes or preparing._quick._held or preparing._long._held))


async def test_what_is_wrong_with_an_input_is_told_and_its_place_is_free():
    preparing = Preparing(quick_s=NEVER)

    def wrong() -> str:
        raise ValueError("no picture")

    for _ in range(QUICK + 1):
        with pytest.raises(ValueError, match="no picture"):
            await preparing.run(A, 1, wrong)


async def test_bytes_that_wait_are_bounded_by_account(files):
    preparing = Preparing(quick_s=NEVER, most_bytes=100)
    held = [asked(preparing, A, files.slow(str(n)), 30) for n in range(3)]
    await until(lambda: len(files.begun) == QUICK)
    with pytest.raises(Full):
        await preparing.run(A, 30, files.quick("too much"))
    # Another account still gets its share.
    other = asked(preparing, B, files.quick("b"), 40)
    await asyncio.sleep(0)
    with pytest.raises(Full):
        await preparing.run(B, 40, files.quick("more than its share"))
    files.over.set()
    assert await asyncio.gather(*held, other) == ["0", "1", "2", "b"]
    assert await preparing.run(A, 90, files.quick("again")) == "again"
