"""Each target of the fuzzer for a moment; the long run is ``python -m benchmarks fuzz``."""

from __future__ import annotations

import json

import pytest

from benchmarks.fuzz import fuzz

MOMENT = 15


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_bad_input_is_refused_as_documented(name):
    fuzz.run(name, MOMENT, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_much_bad_input(name):
    fuzz.run(name, 3000, 11)


def test_a_finding_is_told_with_its_input(monkeypatch, capsys):
    def target(data: bytes) -> None:
        assert b"!" not in data

    right = (target, fuzz.TARGETS["noise"][1])
    monkeypatch.setattr(fuzz, "TARGETS", {"broken": right})
    assert fuzz.main(["--minutes", "1", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert list(found["findings"]) == ["broken"] and "b'!'" in said.err
