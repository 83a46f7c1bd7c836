"""Whether a worker process that does not answer still computes: what tells a hung one from one in a long step.

A step may hold the interpreter for as long as it likes, and then the worker's event loop answers nobody. So silence
alone proves nothing. The kernel counts for every thread how long it has computed, whoever holds the interpreter: a
worker that neither answers nor computes, nor waits for a core, will not answer any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from serve_app.activity import Activity

# From an answer to the next question.
PERIOD_S = 1.0
# Between two looks at one that does not answer. Looks are counted and not time: a replica that was itself stopped for
# an hour has looked once.
LOOK_S = 0.5
# Without an answer and without computing.
SILENT_S = 2.0
# With answers, but in one step that does not compute: it waits for something that does not come. A kernel's first
# compilation in a process of its own is shorter.
STUCK_S = 30.0
# Whoever waits for a GPU computes nothing and still takes a core: a step there may last this long whatever it does.
DEVICE_STEP_S = 120.0


class Watch:
    """Judges one worker by looks, :data:`PERIOD_S` apart while it answers, and else :data:`LOOK_S`. ``device_step_s``:
    how long a step may last in any case.
    """

    def __init__(self, device_step_s: float | None = None) -> None:
        self._device_step_s = device_step_s
        self._before: Activity | None = None
        # Looks in a row at which it rested.
        self._silent = self._stuck = 0

    def look(self, step_s: float | None, activity: Activity | None) -> str:
        """``step_s``: for how long the worker has been in the step in hand, by its latest answer; None: it has not
        answered since the last look. Returns why it has to go, or "".
        """
        before, self._before = self._before, activity
        rests = before is not None and activity is not None and not activity.computes_since(before)
        self._silent = self._silent + 1 if rests and step_s is None else 0
        # A step shorter than the time between two looks may have rested in neither.
        in_step = step_s is not None and step_s > PERIOD_S
        self._stuck = self._stuck + 1 if rests and in_step else 0
        if self._silent * LOOK_S >= SILENT_S:
            return f"it has neither answered nor computed anything for {SILENT_S:g} s"
        if self._stuck * PERIOD_S >= STUCK_S:
            return f"its step has computed nothing for {STUCK_S:g} s"
        if self._device_step_s is not None and step_s is not None and step_s > self._device_step_s:
            return f"its step lasts longer than {self._device_step_s:g} s"
        return ""


def gone(pid: int, seconds: float) -> bool:
    """Waits until a process has ended; False if it has not by then. Blocks."""
    until = time.monotonic() + seconds
    while pid and Path(f"/proc/{pid}").exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def needs_look(step_s: float | None) -> bool:
    """Whether a look has to read counters: one that answers between its steps is well."""
    return step_s is None or step_s > PERIOD_S


def end(pid: int) -> None:
    """Kills a worker, so that it never says another word; never the caller itself."""
    if pid != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
