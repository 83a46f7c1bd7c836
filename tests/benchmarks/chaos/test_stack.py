"""A short seed of the chaos run on the stack, and all faults where they are asked for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.chaos import chaos, clients
from benchmarks.chaos.asks import Ask, asks

# What is over at once, and leaves the session's workers alone.
LIGHT = "tokens-cut,store-locked,tokens-lossy,pool-stopped,prefill-stopped,cpu-busy"


def fewer() -> list[Ask]:
    """Every fourth one; the first three are what probes ask."""
    return [shorter(ask) for number, ask in enumerate(asks()) if number < 3 or number % 4 == 1]


def shorter(ask: Ask) -> Ask:
    """With fewer tokens where any number of them is an answer."""
    limits = {name: 32 for name in ("max_tokens", "max_output_tokens") if ask.body.get(name, 0) > 32}
    return ask if ask.name in ("schema", "tool") else replace(ask, body={**ask.body, **limits})


def test_a_short_seed(stack, capsys, monkeypatch):
    monkeypatch.setattr(clients, "asks", fewer)
    few = [
        "--home",
        str(stack.home),
        "--clients",
        "3",
        "--minutes",
        "0.1",
        "--every",
        "0.2",
        "--recovery",
        "60",
        "--json",
    ]
    code = chaos.main([*few, "--faults", LIGHT, "--seed", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and not found["broken"], found["broke"]
    assert found["faults"] and found["counts"]["streams"] and not found["wrong"]
    # Every complete answer has its entry, with what its client was told.
    assert found["counts"]["entries"] >= found["counts"]["streams"]


@pytest.mark.slow
def test_all_faults(capsys):
    code = chaos.main(["--clients", "6", "--minutes", "8", "--recovery", "60", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, found["broke"]
