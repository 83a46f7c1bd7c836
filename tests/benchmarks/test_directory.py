"""The directory's benchmark on a small scale, with a table that forgets and one that forgets nothing, and the actor."""

from __future__ import annotations

import json

import pytest

from benchmarks.kv import directory
from benchmarks.kv.directory_actor import measure_actor
from benchmarks.kv.held import CHUNKS_OF_PROMPT, World
from serve_app.kv.directory_table import DirectoryTable

FEW = ["--chunks", "12000", "--nodes", "6", "--messages", "20"]


def test_figures_come_from_right_answers_only(monkeypatch, capsys):
    assert directory.main([*FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["fill"]["chunks"] == 222 * CHUNKS_OF_PROMPT and found["fill"]["entries"] > 12_000
    assert found["known_prompts"]["us_per_look"] > 0 and found["restarted_pool"]["sweep"]["seconds"] > 0
    monkeypatch.setattr(DirectoryTable, "sweep", lambda *_: None)
    with pytest.raises(SystemExit, match="no figures(?s:.)*names after a sweep"):
        directory.main(FEW)
    monkeypatch.setattr(DirectoryTable, "best", lambda *_: [])
    with pytest.raises(SystemExit, match="no figures(?s:.)*a look-up"):
        directory.main(FEW)


def test_the_actor(ray_cluster):
    found = measure_actor(World.of(40, 3), 10)
    assert found["looks"]["actor_us_per_call"] > 0 and found["filled"]["longest_message_s"] > 0
    assert found["answers_checked"] == 24 and found["messages"]["calls_per_s_here"] > 0
