"""A thread that brings memory and store together: soon after it is woken, and now and then by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Background:
    """Calls ``turn(poll, last)``: ``poll`` is true every ``poll_s`` seconds, ``last`` in the turn that ends the thread.
    Two turns are ``group_s`` seconds apart, so that what comes in between goes together. ``turn`` raises nothing.
    """

    def __init__(self, name: str, turn: Callable[[bool, bool], None], *, poll_s: float, group_s: float) -> None:
        self._turn = turn
        self._poll_s = poll_s
        self._group_s = group_s
        self._wakes = threading.Event()
        self._ends = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._name = name

    def wake(self) -> None:
        """Has a turn made soon, if the thread has begun."""
        self._wakes.set()

    def begin(self, before: Callable[[], None] = lambda: None) -> None:
        """Starts the thread, ``before`` that once; does nothing where it has begun or been ended."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._ends.is_set():
                before()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def end(self, patience_s: float | None = None) -> None:
        """Has the last turn made, and waits for it for so long."""
        self._ends.set()
        self._wakes.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        polled = float("-inf")
        while not self._ends.is_set():
            self._wakes.wait(self._poll_s)
            self._wakes.clear()
            now = time.monotonic()
            poll = now - polled >= self._poll_s
            if poll:
                polled = now
            self._turn(poll, False)
            self._ends.wait(self._group_s)
        self._turn(True, True)
