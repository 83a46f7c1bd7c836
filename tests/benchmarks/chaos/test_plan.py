"""Which faults come when: a seed says it."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.chaos import chaos
from benchmarks.chaos.faults import FAULTS, selected
from benchmarks.chaos.run import moments, plan


def names(seed: int, count: int) -> list[str]:
    coming = plan(seed, list(FAULTS))
    return [next(coming)[0].fault.name for _ in range(count)]


def test_a_seed_gives_the_same_faults_each_before_any_again():
    size = len(FAULTS)
    assert names(5, 2 * size) == names(5, 2 * size) != names(6, 2 * size)
    assert len(set(names(5, size))) == size == len({fault.name for fault in FAULTS})
    assert list(plan(5, [])) == []


def test_some_come_in_twos_each_as_often_as_alone():
    coming = plan(5, list(FAULTS), 0.5)
    groups = [next(coming) for _ in range(60)]
    assert {len(group) for group in groups} == {1, 2}
    assert all(len({one.fault.name for one in group}) == len(group) for group in groups)
    assert not any(one.fault.alone for group in groups if len(group) == 2 for one in group)
    every = [one.fault.name for group in groups for one in group]
    size = len(FAULTS)
    assert len(set(every[:size])) == size and len(set(every[size : 2 * size])) >= len(every[size : 2 * size]) - 1
    again = plan(5, list(FAULTS), 0.5)
    assert [[one.fault.name for one in next(again)] for _ in range(60)] == [[o.fault.name for o in g] for g in groups]


def test_kills_come_at_seeded_moments_and_hit_all_that_the_issue_names():
    assert moments(5, 200, 10_000) == moments(5, 200, 10_000) != moments(6, 200, 10_000)
    due = moments(5, 200, 10_000)
    assert due == sorted(due) and len(due) == 200 and due[0] < 500 and 9_500 < due[-1] < 10_000
    assert {fault.name.partition("-")[0] for fault in selected("kills")} >= {"gateway", "store", "decode", "encoder"}


def test_unknown_faults_are_refused():
    left = [fault.name for fault in selected("all,-pool-killed,-server-lost")]
    assert len(left) == len(FAULTS) - 2 and "pool-killed" not in left
    assert selected("none") == [] and [f.name for f in selected("pool-killed")] == ["pool-killed"]
    with pytest.raises(SystemExit, match="no such fault: flood"):
        selected("flood")


def test_a_replay_names_no_password():
    options = argparse.Namespace(
        seed=3,
        minutes=2.0,
        clients=4,
        faults="all",
        every=0.0,
        together=0.2,
        database="postgresql://u:secret@h/d",
        kills=0,
        gateways=1,
        postgresql=False,
    )
    assert chaos.replay(options).startswith("python -m benchmarks chaos --seed 3 --minutes 2 ")
    assert "secret" not in chaos.replay(options)
