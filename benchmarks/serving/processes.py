"""What the processes of a stack use: memory and processor time, by process."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

SHARED = "shared memory"


def descendants(pid: int) -> list[int]:
    """A process and everything below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for current in found:  # grows while it is walked
        found += parents.get(current, [])
    return found


def memory_mib(pid: int) -> Counter[str]:
    """Proportional set size of a process and its descendants by name, in MiB: pages shared between them count once.

    Shared memory, which is the object store and the pool's files in it, is a line of its own.
    """
    total: Counter[str] = Counter()
    for current in descendants(pid):
        try:
            lines = Path(f"/proc/{current}/smaps_rollup").read_text().splitlines()
            name = name_of(current)
        except OSError:
            continue
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
        total[SHARED] += kib["Pss_Shmem"] / 1024
        total[name] += (kib["Pss"] - kib["Pss_Shmem"]) / 1024
    return total


def running(pid: int) -> Counter[str]:
    """How many processes of each name there are: a process and its descendants."""
    found: Counter[str] = Counter()
    for current in descendants(pid):
        with contextlib.suppress(OSError):
            found[name_of(current)] += 1
    return found


def cpu_seconds(pid: int) -> dict[str, float]:
    """Of a process and each of its descendants, what it has used so far, by its number and name."""
    found = {}
    for current in descendants(pid):
        try:
            fields = Path(f"/proc/{current}/stat").read_text().rsplit(")", 1)[1].split()
            name = name_of(current)
        except OSError:
            continue
        found[f"{current} {name}"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def name_of(pid: int) -> str:
    """A command line without the folders of its programs, and without the method that an actor is running or the
    processes that an HAProxy has relieved.
    """
    title = command_line(pid).split(" --")[0].strip()
    words = [word.rsplit("/", 1)[-1] for word in title.split()]
    if words and (words[0].startswith("ray::") or words[0] == "haproxy"):
        return words[0].split(".")[0]
    return " ".join(words)[:80]


def command_line(pid: int) -> str:
    """Of a process, with spaces between its words. Raises :class:`OSError` where there is none."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def born(pid: int) -> str | None:
    """When a living process was started, in the kernel's ticks; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
