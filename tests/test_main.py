"""``python -m tests``: two processes look like one."""

from __future__ import annotations

import io
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.__main__ import show, summary
from tests.conftest import pytest_collection_modifyitems


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


def test_every_test_is_in_one_of_the_parts():
    names = {"computes": [], "asks the cluster": ["ray_cluster"], "asks the stack": ["stack", "ray_cluster"]}
    found = {}
    for part in ("cluster", "rest", None):
        items = [SimpleNamespace(name=name, fixturenames=fixtures) for name, fixtures in names.items()]
        pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _, part=part: part), items)
        found[part] = [item.name for item in items]
    assert found == {"cluster": ["asks the cluster", "asks the stack"], "rest": ["computes"], None: list(names)}
