"""What the kernel says of memory: what a process holds, and what the machine can still give away."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Share of the machine's memory from which on Ray ends workers, and what is kept free before that.
RAY_ENDS_AT = 0.95
MARGIN_BYTES = 512 << 20
_UNLIMITED = 1 << 60
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# (limit, usage, statistics, what is called a file's page there) of cgroups' second and first version.
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@dataclass(slots=True, frozen=True)
class Held:
    """Bytes of one process: ``now``, its own pages and of those that it shares with others its part; and ``most``, what
    that is while two processes of its kind are up. The fewer there are, the larger is the part of each: what is shared
    with the process that they are forked from is divided by three then. Without shared memory, which is Ray's object
    store and has a bound of its own.
    """

    now: int = 0
    most: int = 0


def read_held(pid: int) -> Held:
    """Nothing where the process has gone or the system does not tell."""
    found = {}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value, *_ = line.split()
            found[name] = int(value) << 10
        status = Path(f"/proc/{pid}/status").read_text()
    except (OSError, ValueError):
        return Held()
    objects = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssShmem:")), 0)
    now = max(0, found.get("Pss:", 0) - found.get("Pss_Shmem:", 0))
    own = found.get("Private_Clean:", 0) + found.get("Private_Dirty:", 0)
    shared = max(0, found.get("Shared_Clean:", 0) + found.get("Shared_Dirty:", 0) - objects)
    return Held(now, max(now, own + shared // 3))


def spare_bytes() -> int:
    """What processes may still take before Ray or the kernel would end one of them."""
    total, available = _allowed()
    try:
        ends_at = float(os.environ.get("RAY_memory_usage_threshold", ""))  # noqa: SIM112 - Ray's name
    except ValueError:
        ends_at = RAY_ENDS_AT
    return available - int(total * (1.0 - ends_at)) - min(MARGIN_BYTES, total // 50)


def total_bytes() -> int | None:
    """Memory of the machine, or of the container where that has less; None where the system does not tell."""
    total, _ = _allowed()
    return None if total >= _UNLIMITED else total


def _allowed() -> tuple[int, int]:
    """Memory of the machine, or of the container where that has less, and what of it is available."""
    total, available = _machine()
    for limit, usage, statistics, inactive in _CGROUPS:
        if (bound := _number(_CGROUP / limit)) is not None and bound < min(total, _UNLIMITED):
            used = (_number(_CGROUP / usage) or 0) - _statistic(_CGROUP / statistics, inactive)
            return bound, min(available, bound - used)
    return total, available


def _machine() -> tuple[int, int]:
    """All of it, and what is available."""
    found = {}
    try:
        for line in _MEMINFO.read_text().splitlines():
            name, value, *_ = line.split()
            found[name] = int(value) << 10
    except (OSError, ValueError):
        return _UNLIMITED, _UNLIMITED
    return found["MemTotal:"], found["MemAvailable:"]


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # such as "max"
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        for line in file.read_text().splitlines():
            found, value = line.split()
            if found == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
