"""Whether the ranks of a worker live: what each says of itself every second, and what rank 0 makes of silence.

===================================  =====================================================================
a rank has ended                     the kernel closes its line: at once (:mod:`.link`)
its machine is gone                  the kernels ask after each other: after :data:`.frames.GONE_S`
it says nothing and does not compute  after about :data:`RESTS` seconds, on rank 0's machine
it says nothing, on another machine   after :data:`SILENT` seconds
all ranks wait for one another        after :data:`TOGETHER_S`; else what they wait for comes, or one has ended
===================================  =====================================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve_app.activity import Activity

BEAT_S = 1.0
# Looks in a row, one every second, at a rank that has said nothing since the last one: and so a rank 0 that was itself
# stopped for an hour has looked once.
LATE = 2
RESTS = 5
SILENT = 30
# A transfer between ranks takes less.
TOGETHER_S = 20.0


class Waiting:
    """Time that a process spends waiting for other ranks. One thread waits; any may look."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """For how long it has been waiting now; 0: it does not."""
        since = self._since
        return time.perf_counter() - since if since else 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is done inside is waiting."""
        began = self._since = time.perf_counter()
        try:
            yield
        finally:
            self._since = 0.0
            self.total_s += time.perf_counter() - began


class Work:
    """What a rank has computed of steps, in seconds of its processor. One thread computes; any may look."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy_s = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is done inside is a step; who waits for others sleeps."""
        began = time.thread_time()
        yield
        self.steps += 1
        self.busy_s += time.thread_time() - began


class RankWatch:
    """Judges one rank by looks, :data:`BEAT_S` apart."""

    def __init__(self) -> None:
        self._heard = -1
        self._before: Activity | None = None
        self._missed = self._rested = 0

    def look(self, heard: int, read: Callable[[], Activity | None]) -> str:
        """``heard``: how many messages have come from it; ``read``: what its process does, or None where that can't be
        told. Returns why it has to go, or "".
        """
        if heard != self._heard:
            self._heard, self._missed, self._rested, self._before = heard, 0, 0, None
            return ""
        self._missed += 1
        if self._missed < LATE:
            return ""
        activity = read()
        before, self._before = self._before, activity
        rests = before is not None and activity is not None and not activity.computes_since(before)
        self._rested = self._rested + 1 if rests else 0
        if self._rested + LATE > RESTS:
            return f"it has neither said nor computed anything for {RESTS} s"
        if activity is None and self._missed >= SILENT:
            return f"it has said nothing for {SILENT} s"
        return ""


def memory_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
