"""The benchmark of adapters with the smallest model, and with an engine that answers wrongly."""

from __future__ import annotations

import json

import pytest

from benchmarks.lora import lora


def test_lora(capsys):
    few = ["--size", "tiny", "--rank", "4", "--batch", "3", "--new", "6", "--prompt", "5", "--rounds", "1"]
    assert lora.main([*few, "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["share_of_base"]) == {"base", "one", "different"}
    assert found["swapping"]["step_p99_ms"] > 0


class Deaf:
    """A side that says the same whatever the adapter."""

    name = "ours"

    def run(self, prompts, adapters, new, salt):
        return {"tokens": [[7] * new for _ in prompts], "seconds": 1.0, "decode_s": 1.0, "decode_tokens": 1}


def test_an_engine_without_the_adapters():
    with pytest.raises(SystemExit, match=r"no figures(?s:.)*0 of 4 answers differ"):
        lora.measure([Deaf()], 4, 3, 1)


@pytest.mark.slow
def test_even_traffic(capsys):
    few = ["--part", "even", "--size", "tiny", "--rank", "4", "--adapters", "40", "--clients", "5", "--new", "3"]
    assert lora.main([*few, "--threads", "1", "--cache-mb", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["adapters"] == 40 and found["loaded"] > 40 and found["held_mb"] <= 1
    assert set(found["share_of_base"]) == {"first", "again", "placed"}
