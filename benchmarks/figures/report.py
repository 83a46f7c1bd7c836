"""The table of all figures, and where and when they were taken."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.figures.rows import MEASUREMENTS, Found, Measurement, Row

BEGIN = "<!-- figures: `make figures` writes what follows -->"
END = "<!-- end of figures -->"
NOT_MEASURED = {"trace": "no trace was given"}  # of any other peer: it is not measured


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, system."""
    model = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+)", _read("/proc/meminfo"))
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "system": platform.system(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is measured; with a ``+`` if anything but figures differs from it."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = [line[3:] for line in _git("status", "--porcelain").splitlines()]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    ours = ("README.md", "benchmarks/results/")
    return head + ("+" if any(not path.startswith(ours) for path in changed) else "")


def subject() -> str:
    """The first line of that commit's message, by which it is found where history has been written anew."""
    try:
        return _git("log", "-1", "--format=%s")
    except (OSError, subprocess.CalledProcessError):
        return ""


def cell(row: Row, found: Found) -> tuple[str, bool]:
    """What the table shows of a measurement, and whether the target is met."""
    value = row.value(found)
    values = value if isinstance(value, list) else [value]
    return " / ".join(row.shown.format(v) for v in values), row.meets(values)


def figure(measurement: Measurement, row: Row, entry: dict[str, Any] | None) -> str:
    """The cell of one figure: its value, or why there is none."""
    if entry is None:
        return "not measured yet"
    if row.peer is not None and row.peer in entry["missing"]:
        return NOT_MEASURED.get(row.peer, "peer not measured")
    if "problem" in entry:
        return f"**no figure**: {entry['problem']}"
    shown, met = cell(row, entry["found"])
    earlier = entry.get("earlier")
    at = f" (`{earlier['commit'][:8]}`, {earlier['date']})" if earlier else ""
    return shown + ("" if met else " (**misses the target**)") + at


def table(entries: dict[str, dict[str, Any]]) -> str:
    lines = ["| what | target | figure | command |", "| --- | --- | --- | --- |"]
    for measurement in MEASUREMENTS:
        command = " ".join(["python -m", measurement.command, *(more for _, more in measurement.peers if more)])
        command = re.sub(r"\{([\w.-]+)\}", lambda match: match[1].upper(), command)
        for row in measurement.rows:
            shown = figure(measurement, row, entries.get(measurement.name))
            lines.append(f"| {row.what} | {row.target} | {shown} | `{command}` |")
    return "\n".join(lines)


def section(result: dict[str, Any]) -> str:
    """What stands in the README between the markers."""
    where, changed = result["machine"], "+" if result["commit"].endswith("+") else ""
    taken = (
        f"Measured on {result['date']} at commit `{result['commit'][:12]}{changed}`{_named(result)} on "
        f"{where['cores']} cores of {where['cpu']} with {where['memory_gib']} GiB of memory, without a GPU: "
        "`make figures`."
    )
    if earlier := [entry["earlier"] for entry in result["measured"].values() if "earlier" in entry]:
        taken += " Figures with a commit and a day of their own were taken then"
        named = dict.fromkeys(f"`{each['commit'][:8]}`{_named(each)}" for each in earlier if each.get("subject"))
        taken += f": {', '.join(named)}." if named else "."
    return f"{BEGIN}\n\n{taken}\n\n{table(result['measured'])}\n\n{END}"


def _named(taken: dict[str, Any]) -> str:
    """A commit's subject behind its name; figures of before these were noted have none."""
    return f" ({taken['subject']})" if taken.get("subject") else ""


def put(readme: Path, text: str) -> None:
    """Replaces what stands between the markers."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{readme} has no place for figures: it needs the lines {BEGIN!r} and {END!r}")
    readme.write_text(before + text + after)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
