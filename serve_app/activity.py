"""What the kernel counts of a process: whether it does anything, whoever of its threads holds the interpreter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

# Share of a core above which a thread computes. Threads that wait for the interpreter wake up 200 times a second and
# take about a hundredth.
COMPUTES = 0.05


@dataclass(slots=True, frozen=True)
class Activity:
    """Of one process up to the moment ``at`` (monotonic): by thread, the seconds that it has computed, and the pages
    that it had to wait for. ``runnable``: a thread has or wants a core now.
    """

    at: float
    computed: dict[str, float]
    faults: int
    runnable: bool

    def computes_since(self, before: Activity) -> bool:
        """Whether the process did anything that takes time by itself."""
        needed = COMPUTES * (self.at - before.at)
        grown = (seconds - before.computed.get(thread, 0.0) for thread, seconds in self.computed.items())
        return self.runnable or self.faults != before.faults or max(grown, default=0.0) >= needed


def read_activity(pid: int) -> Activity | None:
    """None where the process has gone or the system does not tell (only Linux does)."""
    computed, runnable = {}, False
    try:
        faults = int(_fields(Path(f"/proc/{pid}/stat"))[9])
        for thread in Path(f"/proc/{pid}/task").iterdir():
            computed[thread.name] = int((thread / "schedstat").read_text().split()[0]) * 1e-9
            runnable = runnable or _fields(thread / "stat")[0] == "R"
    except (OSError, ValueError, IndexError):
        return None
    return Activity(time.monotonic(), computed, faults, runnable)


def _fields(stat: Path) -> list[str]:
    """What follows the name, which may contain anything."""
    return stat.read_text().rpartition(")")[2].split()
