"""What is fetched and what is computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serve_app.kv.costs import PRIORS, FetchCosts
from serve_app.kv.reading import moved

MIB = 1 << 20


def test_before_anything_is_measured_everything_is_worth_a_fetch():
    costs = FetchCosts()
    assert costs.worth("remote", 32, 1 << 30) and costs.token_seconds == 0.0
    assert costs.report()["prefill_tokens_per_s"] is None


def test_the_cheaper_way_is_chosen_and_said():
    costs = FetchCosts()
    costs.prefill.add(1000, 1.0)
    # 256 tokens take 256 ms; 32 MiB at the prior rates 17 ms, 69 ms and 139 ms; 128 MiB over the network 540 ms.
    assert all(costs.worth(tier, 256, 32 * MIB) for tier in PRIORS)
    assert not costs.worth("remote", 256, 128 * MIB)
    assert costs.worth("node", 256, 128 * MIB)
    assert costs.decisions == {
        "node: fetch": 2, "disk: fetch": 1, "remote: fetch": 1, "remote: computing is cheaper": 1,
    }  # fmt: skip


@pytest.mark.parametrize("tier", PRIORS)
def test_a_tier_that_turns_out_slow_is_left_alone_until_it_is_fast_again(tier):
    costs = FetchCosts()
    costs.prefill.add(10_000, 1.0)
    assert costs.worth(tier, 1024, 8 * MIB)
    for _ in range(10):
        costs.tiers[tier].add(8 * MIB, 1.0)
    assert not costs.worth(tier, 1024, 8 * MIB)
    for _ in range(3000):
        costs.tiers[tier].add(8 * MIB, 0.004)
    assert costs.worth(tier, 1024, 8 * MIB)


def test_small_transfers_measure_latency_only():
    costs = FetchCosts()
    before = costs.tiers["remote"].per_s
    for _ in range(100):
        costs.tiers["remote"].add(4096, 0.2)
        costs.tiers["node"].add(4096, 0.2)
    assert costs.tiers["remote"].per_s == before
    assert costs.tiers["remote"].latency_s == pytest.approx(0.2, rel=0.01)
    assert costs.tiers["node"].latency_s == 0.0


def test_a_fast_engine_computes_rather_than_waits_for_the_disk():
    costs = FetchCosts()
    costs.prefill.add(100_000, 1.0)
    assert not costs.worth("disk", 64, 64 * 1024)
    costs.prefill.add(100, 10.0)
    assert costs.worth("disk", 64, 64 * 1024)


def test_what_a_guess_says_is_tried_before_long_and_what_was_measured_seldom():
    costs = FetchCosts()
    costs.prefill.add(48_000, 1.0)
    # 12,000 tokens of an 8B model: 786 ms at the prior of 2 GB/s, 250 ms to compute.
    tokens, nbytes = 12_000, 12_000 * 131_072

    def until_tried() -> int:
        for count in range(1, 10_000):
            if costs.worth("node", tokens, nbytes):
                return count
        raise AssertionError("never tried")

    assert until_tried() < 15 and costs.decisions["node: tried"] == 1
    # It was as slow as that: trying again costs little of the time that computing takes.
    costs.measured("node", nbytes, 0.8)
    assert until_tried() > 60
    # Or it is fast, and then it is used.
    for _ in range(20):
        costs.measured("node", nbytes, 0.05)
    assert all(costs.worth("node", tokens, nbytes) for _ in range(100))


def test_what_waits_before_a_fetch_and_the_copy_behind_it_count():
    costs = FetchCosts()
    costs.prefill.add(10_000, 1.0)
    assert costs.worth("node", 1000, 100 * MIB)
    assert not costs.worth("node", 1000, 100 * MIB, queued_bytes=1 << 30)
    # An engine that is busy anyway can wait for it.
    assert costs.worth("node", 1000, 100 * MIB, queued_bytes=1 << 30, busy_s=1.0)
    costs.copies.add(MIB, 0.01)
    assert not costs.worth("node", 1000, 100 * MIB) and costs.copy_seconds(100 * MIB) == pytest.approx(1.0)


def test_that_nothing_comes_in_time_is_learnt_too():
    pieces: list[Any] = [SimpleNamespace(nbytes=2 * MIB)] * 3
    came, late = np.zeros(2 * MIB, np.uint8), TimeoutError()
    assert moved([(pieces[0], came)], pieces, [came, late, late]) == 4 * MIB
    # What a node has lost says nothing of the way to it.
    assert moved([], pieces, [ValueError(), came, came]) == 0
    costs = FetchCosts()
    costs.prefill.add(1000, 1.0)
    tries = 0
    while costs.worth("remote", 768, 6 * MIB):
        costs.measured("remote", moved([], pieces, [late] * 3), 2.0)
        tries += 1
    assert 1 <= tries <= 12
