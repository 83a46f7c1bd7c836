"""``python -m tests``: two processes look like one."""

from __future__ import annotations

import io
import subprocess
from collections import Counter
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest

from tests.__main__ import (
    FAILED,
    MAX_AGAIN,
    OF_THE_CLUSTER,
    PASSED,
    Failure,
    Pytest,
    ended,
    give_up,
    run_again,
    show,
    summary,
)
from tests.parts import claimed, pytest_collection_modifyitems


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("2 failed, 30 passed, 1 skipped, 5 deselected in 148.47s (0:02:28)", [2, 30, 1, 5]),
        ("1 passed, 1 warning, 1 error in 0.10s", [0, 1, 0, 0]),
        ("no tests ran in 0.01s", [0, 0, 0, 0]),
    ],
)
def test_the_closing_line_is_counted_and_not_shown(line, counts):
    out = io.StringIO()
    found = show(f"..F. [100%]\n3 lines that fail\nno, this one as well\n{line}\n", out)
    assert [found[what] for what in ("failed", "passed", "skipped", "deselected")] == counts
    assert out.getvalue() == "..F. [100%]\n3 lines that fail\nno, this one as well\n"


def test_one_line_for_both():
    total = Counter(passed=30, failed=1) + Counter(passed=12, warnings=2)
    assert summary(total, 148.47) == "1 failed, 42 passed, 2 warnings in 148.47s (0:02:28)"


def items_of(tmp_path):
    """Tests by name, in files that tell of their fixtures, and one of the cluster's folder."""
    taken = {"computes": [], "asks the cluster": ["ray_cluster"], "asks the stack": ["stack", "ray_cluster"]}
    found = [SimpleNamespace(name="has a client of its own", fixturenames=[], path=OF_THE_CLUSTER / "test_x.py")]
    for name, fixtures in taken.items():
        path = tmp_path / f"test_{name.split()[-1]}.py"
        path.write_text(f"def test_it({', '.join(fixtures)}): ...")
        found.append(SimpleNamespace(name=name, fixturenames=fixtures, path=path))
    return found


def parts_of(items):
    found = {}
    for part in ("cluster", "rest", None):
        left = list(items)
        pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _, part=part: part), left)
        found[part] = [item.name for item in left]
    return found


def test_every_test_is_in_one_of_the_parts(tmp_path):
    items = items_of(tmp_path)
    names = [item.name for item in items]
    assert parts_of(items) == {"cluster": [names[0], *names[2:]], "rest": ["computes"], None: names}


def test_a_test_of_the_cluster_that_would_not_be_found_is_an_error(tmp_path):
    items = items_of(tmp_path)
    items[-1].path.write_text("def test_it(by_another_name): ...")
    with pytest.raises(pytest.UsageError, match="test_stack"):
        parts_of(items)


def test_each_file_is_taken_by_one_process_and_by_whoever_comes_to_it_first(tmp_path):
    items = [SimpleNamespace(path=Path(f"/tests/test_{n // 3}.py"), number=n) for n in range(30)]
    one, other = claimed(items, tmp_path), claimed(items, tmp_path)
    # The one is in its first file while the other runs nine files.
    found = [next(one).number, *(item.number for item in other)]
    assert found == [0, *range(3, 30)]
    assert [item.number for item in one] == [1, 2]


SHARED = """
import os
from pathlib import Path
from time import monotonic, sleep
import pytest

@pytest.fixture(scope="session")
def other():
    # Until the other process runs tests as well.
    (Path(__file__).parent / f"begun-{os.getpid()}").touch()
    end = monotonic() + 60
    while len(list(Path(__file__).parent.glob("begun-*"))) < 2 and monotonic() < end:
        sleep(0.01)

@pytest.mark.parametrize("number", range(3))
def test_it(number, other):
    with (Path(__file__).parent / "ran").open("a") as ran:
        ran.write(f"{Path(__file__).name} {number}\\n")
"""


def test_processes_run_each_test_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for n in range(6):
        (tmp_path / f"test_{n}.py").write_text(SHARED)
    here = ["-p", "tests.parts", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    (between := tmp_path / "between").mkdir()
    files = sorted(map(str, tmp_path.glob("test_*.py")))
    command = Pytest(here, tmp_path / "failed").command("rest", files, "--processes", "2", "--between", str(between))
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == PASSED, ran.stdout + ran.stderr
    assert not show(ran.stdout, io.StringIO())["passed"]
    assert [one.code for one in ended(between)] == [PASSED] * 2
    counts = [show(one.said, io.StringIO())["passed"] for one in ended(between)]
    assert sum(counts) == 18 and all(counts)
    assert sorted((tmp_path / "ran").read_text().splitlines()) == [
        f"test_{n}.py {i}" for n in range(6) for i in range(3)
    ]


FLAKY = """
import pytest
from pathlib import Path

def second_time(name):
    seen = Path(__file__).with_name(name)
    before = seen.exists()
    seen.touch()
    return before

@pytest.fixture
def ray_cluster(): ...

def test_good(): ...

@pytest.mark.parametrize("what", ["a name :: with [everything]"])
def test_flaky(what):
    print("what it says")
    assert second_time("rest")

def test_flaky_with_the_cluster(ray_cluster):
    assert second_time("cluster")

def test_that_its_clean_up_fails(request):
    request.addfinalizer(lambda: 1 / 0)
"""


@pytest.mark.slow
def test_what_passes_when_it_is_run_again_is_reported_and_what_fails_twice_fails_the_run(tmp_path, monkeypatch):
    """By pytest itself, on a file of three tests that fail."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    file = tmp_path / "test_some.py"
    file.write_text(FLAKY)
    here = ["-p", "tests.parts", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    again, total = Pytest(here, tmp_path / "failed"), Counter[str]()
    for part in ("cluster", "rest"):
        ran = subprocess.run(again.command(part, [str(file)]), capture_output=True, text=True)
        assert ran.returncode == FAILED, ran.stdout
        total += show(ran.stdout, io.StringIO())
    failed = again.failed()
    assert Counter(failure.part for failure in failed) == {"cluster": 1, "rest": 2}
    out = io.StringIO()
    assert run_again(again, failed, total, out) == FAILED
    assert total["failed"] == 1 and not total["errors"]
    why = out.getvalue()[out.getvalue().index("\nfailed at first: ") :]
    assert why.count("\nfailed at first: ") == 3 and why.count("\nfailed again: ") == 1
    assert why.count("E       AssertionError: assert False") == 2 and why.count("E   ZeroDivisionError") == 2
    assert why.count("--- Captured stdout call\nwhat it says") == 1
    told = [line for line in why.splitlines() if line.startswith("PASSED ONLY WHEN RUN AGAIN, ALONE: ")]
    assert len(told) == 2 and all(line.endswith(" - mend it") for line in told)
    assert "test_flaky_with_the_cluster" in told[0] and "a name :: with [everything]" in told[1]
    # What has passed the second time is enough.
    assert run_again(again, [each for each in failed if each.part == "cluster"], total, io.StringIO()) == PASSED
    assert not total["failed"]


def test_many_failures_are_no_accident(tmp_path):
    out, total = io.StringIO(), Counter(failed=MAX_AGAIN + 1)
    failed = [Failure("rest", f"tests/test_x.py::test_{n}", "E  it") for n in range(MAX_AGAIN + 1)]
    assert run_again(Pytest([], tmp_path / "failed"), failed, total, out) == FAILED
    assert total["failed"] == MAX_AGAIN + 1 and out.getvalue().count("\nE  it\n") == MAX_AGAIN + 1
    assert "running again" not in out.getvalue()


HANGS = """
import asyncio, time
from pathlib import Path
import pytest

def test_waits_for_ever():
    asyncio.run(asyncio.Event().wait())

@pytest.mark.slow
def test_slow_has_longer(request):
    assert request.node.get_closest_marker("timeout").args[0] > 600

def test_asleep():
    Path(__file__).with_name("asleep").touch()
    time.sleep(600)
"""


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """How to start a pytest whose tests hang."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_some.py").write_text(HANGS)
    here = ["-p", "tests.parts", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    return lambda *more: Pytest([*here, *more], tmp_path / "failed").command("rest", [str(tmp_path)])


def test_a_test_that_hangs_fails_and_those_behind_it_run(hanging, request):
    assert request.config.getini("timeout") and request.config.getini("timeout_method") == "signal"
    limits = ["-p", "pytest_timeout", "--timeout", "1", "--timeout-method", "signal"]
    ran = subprocess.run(hanging(*limits, "-k", "not asleep"), capture_output=True, text=True)
    assert ran.returncode == FAILED and "Timeout (>1.0s)" in ran.stdout, ran.stdout
    assert "1 failed, 1 passed" in ran.stdout


def test_what_is_not_over_in_time_tells_where_it_is(hanging, tmp_path):
    running = [
        subprocess.Popen(hanging("-k", "asleep"), stdout=said, stderr=said, start_new_session=True, text=True)
        for said in ((tmp_path / name).open("w") for name in ("cluster", "others"))
    ]
    while not (tmp_path / "asleep").exists():
        sleep(0.05)
    give_up(*running)
    assert all(one.wait(60) < 0 for one in running)
    assert any("in test_asleep" in (tmp_path / name).read_text() for name in ("cluster", "others"))
