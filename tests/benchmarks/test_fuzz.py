"""Each target of the fuzzer for a moment; the long run is ``python -m benchmarks fuzz``."""

from __future__ import annotations

import json

import pytest

from benchmarks.fuzz import coverage, fuzz, raw, targets

MOMENT = 15


@pytest.mark.parametrize("name", targets.TARGETS)
def test_bad_input_is_refused_as_documented(name):
    targets.run(name, MOMENT, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", targets.TARGETS)
def test_much_bad_input(name):
    targets.run(name, 3000, 11)


def test_a_finding_is_told_with_its_input(monkeypatch, capsys):
    def target(data: bytes) -> None:
        assert b"!" not in data

    right = (target, targets.TARGETS["noise"][1])
    monkeypatch.setattr(targets, "TARGETS", {"broken": right})
    assert fuzz.main(["--minutes", "1", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert list(found["findings"]) == ["broken"] and "b'!'" in said.err


@pytest.mark.parametrize("name", raw.readers())
def test_readers_of_bytes_take_what_is_right_and_refuse_the_rest(name):
    reader = raw.readers()[name]
    assert reader.right
    for data in reader.right:
        reader.read(data)
        reader.read(data[: len(data) // 2])
        reader.read(data[::-1])


def test_what_leads_by_coverage_may_be_lacking(monkeypatch):
    monkeypatch.setattr(coverage, "is_there", lambda: False)
    with pytest.raises(SystemExit, match="pip install"):
        fuzz.main(["--coverage"])


def test_what_was_found_by_coverage_is_told_without_what_led_to_it():
    said = "#3 NEW cov: 9\nTraceback (most recent call last):\n  File\nKeyError: 'a'\n==7== ERROR: libFuzzer\n"
    told = coverage._finding(said + "artifact_prefix='/x/'; Test unit written to /x/crash-1\nstat::more: 2")
    assert told.splitlines()[0].endswith("/x/crash-1") and told.splitlines()[-1] == "KeyError: 'a'"


@pytest.mark.slow
@pytest.mark.skipif(not coverage.is_there(), reason=coverage.MISSING)
@pytest.mark.parametrize("name", ["frames", coverage.RAW + "multipart"])
def test_inputs_are_led_by_the_code_that_they_reach(name, tmp_path):
    tried = coverage.run(name, 10, tmp_path, 1)
    assert tried.finding is None, tried.finding
    assert tried.inputs > 100 and tried.reached > 10
    assert len(list((tmp_path / name.replace(" ", "-")).iterdir())) > 1
