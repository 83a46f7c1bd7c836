"""``python -m tests``: the whole suite in two processes at a time, and one line of counts for all.

Tests of the Ray cluster wait for processes most of the time; all others compute. So the one process runs the cluster's
tests, and the other the rest, in parts, large ones first; whoever is done takes the next part. Each loads only the
files that may have tests for it. What the cluster's tests print is seen at once, the rest when all has ended.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

NO_TESTS = 5  # pytest's exit status
# Of the rest, in shares of its files: the smaller the last ones, the sooner both processes are done.
PARTS = (6, 4, 2)
# All tests of this folder are the cluster's, of others those that take its fixtures.
OF_THE_CLUSTER = Path(__file__).parent / "e2e"
FIXTURES = re.compile(r"(?<![.\w])(ray_cluster|stack)\b")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)\b")
CLOSING = re.compile(rf"({COUNT.pattern}(, )?)+ in [\d.]+s( \([\d:]+\))?|no tests ran in [\d.]+s")
ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors")
ONE = {"error": "errors", "warning": "warnings"}


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    parts = shared_out([path for path in files if OF_THE_CLUSTER not in path.parents])
    with ThreadPoolExecutor(1) as beside:
        others = beside.submit(run_parts, command, parts)
        theirs = [str(path) for path in files if may_need_the_cluster(path)]
        cluster = subprocess.Popen([*command, "--part", "cluster", *theirs], stdout=subprocess.PIPE, text=True)
        assert cluster.stdout is not None
        total = show(iter(lambda: cluster.stdout.read(1), ""), sys.stdout)  # type: ignore[union-attr]
        codes = [cluster.wait()]
        for code, said in [*run_parts(command, parts), *others.result()]:
            total += show(said, sys.stdout)
            codes.append(code)
    print(summary(total, time.monotonic() - started))
    return next((code for code in codes if code not in (0, NO_TESTS)), 0 if 0 in codes else NO_TESTS)


def may_need_the_cluster(file: Path) -> bool:
    """Whether a file may have tests of the cluster."""
    return OF_THE_CLUSTER in file.parents or FIXTURES.search(file.read_text()) is not None


def shared_out(files: list[Path]) -> queue.SimpleQueue[list[str]]:
    """The files in parts, each from all folders alike."""
    parts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    at = 0
    for share in PARTS:
        parts.put([str(path) for n, path in enumerate(files) if at <= n % sum(PARTS) < at + share])
        at += share
    return parts


def run_parts(command: list[str], parts: queue.SimpleQueue[list[str]]) -> list[tuple[int, str]]:
    """Takes parts, which are files, while there are any; the status of each and what it has printed."""
    done = []
    with contextlib.suppress(queue.Empty):
        while True:
            ran = subprocess.run(
                [*command, "--part", "rest", *parts.get_nowait()],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=half_of_the_cores(),
            )  # fmt: skip
            done.append((ran.returncode, ran.stdout))
    return done


def half_of_the_cores() -> dict[str, str]:
    """Threads that wait for one whose core is taken compute nothing: torch gets what the cluster leaves."""
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)), **os.environ}


def show(said: Iterable[str], out: TextIO) -> Counter[str]:
    """Passes characters on as they come, but for pytest's closing line, whose counts are returned."""
    found: Counter[str] = Counter()
    line, held = "", False
    for char in said:
        held = held or (not line and (char.isdigit() or char == "n"))
        line += char
        if not held:
            out.write(char)
            out.flush()
        if char != "\n":
            continue
        if held and CLOSING.fullmatch(line.strip()):
            found.update({ONE.get(what, what): int(number) for number, what in COUNT.findall(line)})
        elif held:
            out.write(line)
        line, held = "", False
    if held:
        out.write(line)
    return found


def summary(total: Counter[str], seconds: float) -> str:
    """One closing line as pytest writes it."""
    shown = ", ".join(f"{total[what]} {what}" for what in ORDER if total[what]) or "no tests ran"
    minutes, rest = divmod(int(seconds), 60)
    return f"{shown} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rest:02})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
