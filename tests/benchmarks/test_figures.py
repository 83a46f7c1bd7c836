"""The README's table: right, missed, failed and missing figures, and how an interrupted run goes on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import commands
from benchmarks.figures import figures, places, report, rows
from benchmarks.figures.rows import Measurement, Row, at_least

FAST = Row("speed", lambda f: f["speeds"], "{:.1f}x", "at least 2x", at_least(2))
PEER = Row("beside the peer", lambda f: f["peer"], "{:.0f}", "at least 1", at_least(1), "vllm")
REAL_COMMIT, REAL_SUBJECT = report.commit, report.subject
ONE = Measurement("one", "benchmarks one", "benchmarks one", (FAST, PEER), (("vllm", "--vllm {vllm}"),))


@pytest.fixture(autouse=True)
def only_one(monkeypatch):
    for module in (figures, report):
        monkeypatch.setattr(module, "MEASUREMENTS", (ONE,))
    monkeypatch.setattr(figures, "others", lambda: 0.0)
    monkeypatch.setattr(report, "commit", lambda: "a" * 40)
    monkeypatch.setattr(report, "subject", lambda: "What is true of a")
    for variable in places.PEERS.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def files(tmp_path) -> list[str]:
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return ["--results", str(tmp_path / "figures.json"), "--readme", str(tmp_path / "README.md")]


@pytest.fixture
def ends(monkeypatch):
    """``ends(code, out, err)``: how every measurement ends; a list of the commands that were run."""
    ran: list[list[str]] = []

    def set_end(code: int, out: str, err: str = "") -> list[list[str]]:
        def run(command, **_):
            ran.append(command)
            return subprocess.CompletedProcess(command, code, out, err)

        monkeypatch.setattr(figures.subprocess, "run", run)
        return ran

    return set_end


def readme(files: list[str]) -> str:
    return Path(files[3]).read_text()


def test_a_table_with_what_misses_its_target(files, ends):
    ran = ends(0, 'progress\n{"speeds": [3.0, 1.5]}\n')
    assert figures.main(files) == 0
    text = readme(files)
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert (
        "| speed | at least 2x | 3.0x / 1.5x (**misses the target**) | `python -m benchmarks one --vllm VLLM` |" in text
    )
    assert "| beside the peer | at least 1 | peer not measured |" in text
    assert "at commit `aaaaaaaaaaaa` (What is true of a) on" in text and "GiB" in text and "old" not in text
    assert [command[2:] for command in ran] == [["benchmarks", "one", "--json"]]


def test_a_measurement_that_fails_has_no_figure(files, ends, capsys):
    ends(1, "", "ours 3x faster\nno figures: 2 of 9 answers are wrong\n  2 x ours: status 503\n")
    assert figures.main(files) == 1
    assert "| **no figure**: no figures: 2 of 9 answers are wrong 2 x ours: status 503 |" in readme(files)
    assert "failed, and tried again by the next run: one" in capsys.readouterr().err
    ends(0, "3x faster")
    assert figures.main(files) == 1
    assert "its output can't be read" in readme(files)


def test_an_interrupted_run_goes_on(files, ends, monkeypatch, capsys):
    other = Measurement("other", "benchmarks other", "benchmarks other", (FAST,))
    for module in (figures, report):
        monkeypatch.setattr(module, "MEASUREMENTS", (ONE, other))
    ran = ends(0, '{"speeds": 4.0}')
    assert figures.main(["--only", "one", *files]) == 0
    assert "not measured yet" in readme(files) and "left to measure: other" in capsys.readouterr().out
    assert figures.main(files) == 0
    assert [command[3] for command in ran] == ["one", "other"] and readme(files).count("4.0x") == 2
    assert figures.main(["--again", "--only", "other", *files]) == 0
    assert [command[3] for command in ran] == ["one", "other", "other"]
    # At another commit nothing of this one counts.
    monkeypatch.setattr(report, "commit", lambda: "b" * 40)
    assert figures.main(files) == 0
    assert [command[3] for command in ran][3:] == ["one", "other"]


def test_figures_of_earlier_commits_stay_where_they_are_to(files, ends, monkeypatch, capsys):
    other = Measurement("other", "benchmarks other", "benchmarks other", (FAST,))
    for module in (figures, report):
        monkeypatch.setattr(module, "MEASUREMENTS", (ONE, other))
    ran = ends(0, '{"speeds": 4.0, "peer": 7}')
    assert figures.main(files) == 0
    for commit, taken in (("b", "one"), ("c", "other")):
        monkeypatch.setattr(report, "commit", lambda commit=commit: commit * 40)
        monkeypatch.setattr(report, "subject", lambda commit=commit: f"What is true of {commit}")
        assert figures.main(["--keep", "--only", taken, *files]) == 0
    assert [command[3] for command in ran] == ["one", "other", "one", "other"]
    text = readme(files)
    assert "| 4.0x (`bbbbbbbb`, " in text and "| 4.0x | `python -m benchmarks other` |" in text
    assert "taken then: `bbbbbbbb` (What is true of b)." in text
    assert "at commit `cccccccccccc` (What is true of c)" in text and "left to measure: one" in capsys.readouterr().out


def test_a_peer_that_has_come_is_measured(files, ends, tmp_path):
    ran = ends(0, '{"speeds": 4.0, "peer": 7}')
    assert figures.main(files) == 0
    (tmp_path / "python").write_text("")
    assert figures.main([*files, "--vllm", str(tmp_path / "python")]) == 0
    assert ran[1][3:] == ["one", "--vllm", str(tmp_path / "python"), "--json"]
    assert "| beside the peer | at least 1 | 7 |" in readme(files)
    with pytest.raises(SystemExit, match="FIGURES_VLLM: there is no /nowhere"):
        figures.main([*files, "--vllm", "/nowhere"])


def test_quick_figures_are_not_written(files, ends, capsys):
    ends(0, '{"speeds": 4.0}')
    assert figures.main(["--quick", *files]) == 0
    assert "old" in readme(files) and not Path(files[1]).exists() and "4.0x" in capsys.readouterr().out


def test_every_command_is_there():
    known = commands()
    for measurement in rows.MEASUREMENTS:
        for command in (measurement.command, measurement.quick):
            module, name = command.split()[:2]
            assert module == "training.evaluate" or (module == "benchmarks" and name in known)
        assert (
            {row.peer for row in measurement.rows} - {None}
            <= {peer for peer, _ in measurement.peers}
            <= set(places.PEERS)
        )
    names = [measurement.name for measurement in rows.MEASUREMENTS]
    assert len(set(names)) == len(names)


def test_the_readme_has_a_place_for_them():
    text = (figures.ROOT / "README.md").read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1 and text.index(report.BEGIN) < text.index(report.END)


def test_what_has_been_measured_can_be_read():
    path = figures.RESULTS / "figures.json"
    if path.exists():
        told = set(json.loads(path.read_text()))
        assert told - {"subject"} == {"date", "commit", "machine", "measured"}  # those of before have no subject


def test_a_commit_is_told_with_its_subject():
    head = subprocess.run(["git", "log", "-1", "--format=%H %s"], cwd=figures.ROOT, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("this tree has no history")
    name, _, said = head.stdout.strip().partition(" ")
    assert REAL_COMMIT().removesuffix("+") == name and REAL_SUBJECT() == said != ""
