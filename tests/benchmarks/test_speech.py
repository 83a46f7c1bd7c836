"""How fast speech is written down: measured on the shipped model, and every text beside transformers' pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import run
from benchmarks.speech import speech
from benchmarks.speech.speech import PICO, Sound, word_error_rate


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    (tmp_path / "one.wav").write_bytes((PICO / "example.wav").read_bytes())
    (tmp_path / "one.txt").write_text("Turn on the light in the kitchen.")
    return tmp_path


def test_figures_come_from_the_texts_of_transformers(sounds, capsys, monkeypatch):
    quick = ["speech", "--sounds", str(sounds), "--rounds", "1", "--long", "0", "--threads", "1", "--json"]
    assert run(quick) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for way in ("one by one", "together"):
        ours, theirs = found[way]["ours"], found[way]["transformers"]
        assert ours["real_time_factor"] > 0 and ours["word_error_rate"] == theirs["word_error_rate"]
        assert found[way]["times_transformers"] > 0
    monkeypatch.setattr(speech.Ours, "one_by_one", lambda self, sounds: ["Something else."] * len(sounds))
    with pytest.raises(SystemExit, match="no figures: 1 of 2 answers are wrong"):
        run(quick)


def test_words_are_counted():
    given = [Sound(b"", "Turn on the light."), Sound(b"", "Stop."), Sound(b"", "")]
    assert word_error_rate(["turn on the lamp", "Stop now.", "what is not known"], given) == 2 / 5
    assert word_error_rate([""], [Sound(b"", "")]) is None
