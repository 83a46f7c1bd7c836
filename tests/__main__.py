"""``python -m tests``: the whole suite in four processes at a time, and one line of counts for all.

Tests of the Ray cluster wait for processes most of the time, and so do many of the others. So one process runs the
cluster's tests, and three the rest (forks of one that has collected them): each takes the next file that none has
begun, so that all end at the same time.
The rest has what the cluster's tests leave of the cores: these take longer with every process that they share them
with. What they print is seen at once, the rest when all has ended.

Where few tests have failed they are run again, alone. What passes then is reported, and does not fail the run. Why
each has failed, both times, is told once more in short at the very end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

# pytest's exit statuses: all passed, some failed, there were none. Any other says that not all of them have run.
PASSED, FAILED, NO_TESTS = 0, 1, 5
# How many processes run the rest beside the cluster's tests.
BESIDE = 3
# More failures than these are no accident.
MAX_AGAIN = 5
# Seconds after which all is given up: a test that hangs fails long before (pyproject.toml).
MAX_S = 3600.0
# Of so many it is told at the end why they have failed.
MAX_TOLD = 20
# All tests of this folder are the cluster's, of others those that take its fixtures.
OF_THE_CLUSTER = Path(__file__).parent / "e2e"
ROOT = Path(__file__).resolve().parents[1]
FIXTURES = re.compile(r"(?<![.\w])(ray_cluster|stack)\b")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)\b")
CLOSING = re.compile(rf"({COUNT.pattern}(, )?)+ in [\d.]+s( \([\d:]+\))?|no tests ran in [\d.]+s")
# What is deselected here is mostly run by another process.
ORDER = ("failed", "passed", "skipped", "xfailed", "xpassed", "warnings", "errors")
ONE = {"error": "errors", "warning": "warnings"}
STOPS_EARLY = re.compile(r"-x|--exitfirst|--maxfail(=.*)?")


class Failure(NamedTuple):
    """A test that has failed: in which part, and why in short."""

    part: str | None
    name: str
    why: str


@dataclass(frozen=True)
class Pytest:
    """How to start it: with arguments of the caller's, and a file that tells of failed tests."""

    arguments: list[str]
    failed_to: Path

    def command(self, part: str | None, tests: Iterable[str], *more: str) -> list[str]:
        options = ["-q", *self.arguments, "--part", str(part), "--failed-to", str(self.failed_to), *more]
        return [sys.executable, "-m", "pytest", *options, *tests]

    def failed(self) -> list[Failure]:
        """The tests that have failed since the last call, each once."""
        found: dict[str, Failure] = {}
        if self.failed_to.exists():
            for line in self.failed_to.read_text().splitlines():
                new = Failure(*json.loads(line))
                before = found.get(new.name)
                found[new.name] = new if before is None else before._replace(why=f"{before.why}\n{new.why}")
            self.failed_to.unlink()
        return list(found.values())


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-") as scratch:
        pytest = Pytest(arguments, Path(scratch) / "failed")
        status, total = run_all(pytest)
        failed = pytest.failed()
        if status == FAILED and not any(STOPS_EARLY.fullmatch(argument) for argument in arguments):
            status = run_again(pytest, failed, total, sys.stdout)
        else:
            tell_why("failed", failed, sys.stdout)
    if status not in (PASSED, FAILED, NO_TESTS):
        print(f"not all tests have run: a process of pytest ended with status {status}")
    print(summary(total, time.monotonic() - started))
    return status


def run_all(pytest: Pytest) -> tuple[int, Counter[str]]:
    """The exit status of them all, and what has been counted."""
    # Some hundred processes that import the project would compile it each for itself.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.monotonic()
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    with tempfile.TemporaryDirectory(prefix="between-") as between:
        rest = [str(path) for path in files if OF_THE_CLUSTER not in path.parents]
        others = start_rest(pytest, rest, between)
        theirs = [str(path) for path in files if may_need_the_cluster(path)]
        cluster = subprocess.Popen(pytest.command("cluster", theirs), stdout=subprocess.PIPE, text=True)
        assert cluster.stdout is not None
        late = threading.Timer(MAX_S, give_up, (cluster, others))
        late.start()
        try:
            total = show(iter(lambda: cluster.stdout.read(1), ""), sys.stdout)  # type: ignore[union-attr]
            codes, took = [cluster.wait()], [time.monotonic() - started]
            # Where it could not collect the tests it says so itself.
            total += show(others.communicate()[0], sys.stdout)
        finally:
            late.cancel()
            # A terminal's Ctrl-C does not reach another session.
            if others.poll() is None:
                os.killpg(others.pid, signal.SIGINT)
        codes.append(others.returncode)
        for one in ended(Path(between)):
            total += show(one.said, sys.stdout)
            codes.append(one.code)
            took.append(one.seconds)
    print(f"seconds: {took[0]:.0f} of the cluster's tests, {', '.join(f'{s:.0f}' for s in took[1:])} of the others")
    return together(codes), total


def together(codes: list[int]) -> int:
    """One exit status for several: the worst of them, and none without tests unless all are."""
    worst = [code for code in codes if code not in (PASSED, FAILED, NO_TESTS)]
    return worst[0] if worst else FAILED if FAILED in codes else PASSED if PASSED in codes else NO_TESTS


def run_again(pytest: Pytest, failed: list[Failure], total: Counter[str], out: TextIO) -> int:
    """Gives the tests that failed a second chance, if they are few: one process at a time, and nothing beside it.
    Corrects the counts by what they do then; the exit status.
    """
    names = [failure.name for failure in failed]
    if not 0 < len(names) <= MAX_AGAIN:
        tell_why("failed", failed, out)
        return FAILED
    out.write(f"\nrunning again, alone, what has failed ({len(names)} of at most {MAX_AGAIN} tests):\n")
    codes, found = [], Counter[str]()
    for part in dict.fromkeys(failure.part for failure in failed):
        tests = [failure.name for failure in failed if failure.part == part]
        ran = subprocess.run(pytest.command(part, tests), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found += show(ran.stdout, out)
        codes.append(ran.returncode)
    status = together(codes)
    again = pytest.failed()
    twice = {failure.name for failure in again}
    # One that is skipped has not passed.
    all_have_run = status in (PASSED, FAILED) and not found["skipped"]
    passed = [name for name in names if name not in twice and all_have_run]
    tell_why("failed at first", failed, out)
    tell_why("failed again", again, out)
    for name in passed:
        out.write(f"PASSED ONLY WHEN RUN AGAIN, ALONE: {short(name)} - mend it\n")
    total["failed"], total["errors"] = len(names) - len(passed), 0
    total["passed"] += len(passed)
    return FAILED if status == PASSED and total["failed"] else status


def tell_why(when: str, failed: list[Failure], out: TextIO) -> None:
    """Once more, in short: who reads the log of a run may see no more than its end."""
    for failure in failed[:MAX_TOLD]:
        out.write(f"\n{when}: {short(failure.name)}\n{failure.why}\n")
    if len(failed) > MAX_TOLD:
        out.write(f"\n{when}: {len(failed) - MAX_TOLD} more\n")


def short(name: str) -> str:
    return name.removeprefix(f"{ROOT}/")


def may_need_the_cluster(file: Path) -> bool:
    """Whether a file may have tests of the cluster."""
    return OF_THE_CLUSTER in file.parents or FIXTURES.search(file.read_text()) is not None


def start_rest(pytest: Pytest, files: list[str], between: str) -> subprocess.Popen[str]:
    """The process that becomes those that share ``files`` out, in the folder ``between``."""
    command = pytest.command("rest", files, "--processes", str(BESIDE), "--between", between)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=half_of_the_cores(),
        preexec_fn=give_way, start_new_session=True,
    )  # fmt: skip


def give_way() -> None:
    """To every other process, for this one and those it starts.

    Linux may share the cores out between sessions first (sched(7), "The autogroup feature"). Then what a process gives
    way to is its own session only, and each of Ray's workers has one: the session has to give way as well.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(15)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def give_up(cluster: subprocess.Popen[str], others: subprocess.Popen[str]) -> None:
    """Ends what still runs; each process prints first where its threads are."""
    print(f"\nnot over after {MAX_S:.0f} s: ended, with where each process is", flush=True)
    for running in (cluster, others):
        with contextlib.suppress(ProcessLookupError):
            if running.poll() is None:
                (os.kill if running is cluster else os.killpg)(running.pid, signal.SIGABRT)


class Ended(NamedTuple):
    """One of them: its exit status, how long it took, and what it has printed."""

    code: int
    seconds: float
    said: str


def ended(between: Path) -> list[Ended]:
    files = sorted(between.glob("*.ended"))
    return [Ended(*json.loads(file.read_text()), file.with_suffix(".said").read_text()) for file in files]


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
