"""Options of pytest by which ``python -m tests`` runs the suite in parts and learns which tests have failed.

What tests import takes longer to load than many of them to run. So the processes of one part are forks of one that has
collected all its tests.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.__main__ import OF_THE_CLUSTER, may_need_the_cluster

# Collections took a seventh of the tests' time and a fifth of that of what they import: none happens before the tests
# run, few then.
gc.disable()
SELDOM = (20_000, 20, 20)
# Seconds after which a slow test hangs.
SLOW_S = 5400
# Why a test has failed, told in short: so many lines of each kind, so many characters a line.
LINES, WIDTH = 20, 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("cluster", "rest"), help="only tests of the Ray cluster, or all others")
    parser.addoption("--processes", type=int, help="so many run the tests, each file in one of them")
    parser.addoption("--between", type=Path, help="a folder by which they share out the files, and for what they say")
    parser.addoption("--failed-to", type=Path, help="a file to which the part and path of each failed test are added")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(SLOW_S))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if not part:
        return
    needing = [item for item in items if "ray_cluster" in getattr(item, "fixturenames", ())]
    if lost := sorted({item.path.name for item in needing if not may_need_the_cluster(item.path)}):
        raise pytest.UsageError(f"tests of the cluster that nothing in their files tells of: {', '.join(lost)}")
    needing += [item for item in items if OF_THE_CLUSTER in item.path.parents]
    items[:] = [item for item in items if (item in needing) == (part == "cluster")]


def claimed(items: list[pytest.Item], claims: Path) -> Iterator[pytest.Item]:
    """The tests of those files that no other process has taken, each of which is taken when it is its turn."""
    for path, tests in groupby(items, key=lambda item: item.path):
        try:
            (claims / str(path).replace("/", "|")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from tests


def is_fork(config: pytest.Config, processes: int, between: Path) -> bool:
    """Whether this is one of ``processes`` that go on as this one would have. The one that was has waited for them."""
    capture, temporary = config.pluginmanager.getplugin("capturemanager"), Path(tempfile.gettempdir())
    running: dict[int, int] = {}
    # What is there already is shared for as long as nobody touches it.
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    started = time.monotonic()
    for number in range(processes):
        if pid := os.fork():
            running[pid] = number
            continue
        capture.stop_global_capturing()
        with (between / f"{number}.said").open("wb") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        own = temporary / str(number)
        own.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(own)
        return True
    for pid, number in running.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (between / f"{number}.ended").write_text(json.dumps([code, time.monotonic() - started]))
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    processes, between = session.config.getoption("--processes"), session.config.getoption("--between")
    gc.set_threshold(*SELDOM)
    gc.enable()
    if processes is None or session.testsfailed or session.config.option.collectonly:
        return None
    if not is_fork(session.config, processes, between):
        return True
    items = claimed(sorted(session.items, key=lambda item: item.path), between)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def why(report: pytest.TestReport) -> str:
    """The lines that failed and their errors, and the end of what was captured."""
    told = [line for line in report.longreprtext.splitlines() if line.startswith(("E  ", ">"))][-LINES:]
    for title, captured in report.sections:
        told += [f"--- {title}", *captured.splitlines()[-LINES:]]
    return "\n".join(line[:WIDTH] for line in told)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    file = item.config.getoption("--failed-to")
    if file is not None and report.failed:
        with file.open("a") as failed:
            name = f"{item.config.rootpath}/{item.nodeid}"
            failed.write(json.dumps([item.config.getoption("--part"), name, why(report)]) + "\n")
    return report
