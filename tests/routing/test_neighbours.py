"""Whether a request is passed to another cluster: the policy, which has no clock."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.routing.neighbours import Line, Option, PassConfig, Passing

IDLE = Line(0.0, 0.05, 1e-4)
BUSY = Line(8.0, 0.05, 1e-4)


def option(name: str = "paris", latency: float = 0.03, line: Line = IDLE, **more: int) -> Option:
    return Option(name, latency, line, **more)


def test_what_is_soon_here_stays_and_what_waits_long_goes_where_it_does_not() -> None:
    policy = Passing()
    assert policy.choose(0.3, 1000, [option()]) is None
    chosen = policy.choose(8.0, 1000, [option("far", 0.9), option("near"), option("busy", line=BUSY)])
    assert chosen is not None and chosen.name == "near"
    # Latency and the way of the prompt count: this is the whole time until the token is here.
    assert chosen.ttft == pytest.approx(0.05 + 1000e-4 + 0.03 + 4000 / 10e6)


def test_the_margin_keeps_what_would_gain_little() -> None:
    policy = Passing(PassConfig(margin_s=0.5, share=0.3))
    assert policy.choose(1.0, 1000, [option(line=Line(0.4, 0.05, 1e-4))]) is None
    assert policy.choose(10.0, 1000, [option(line=Line(7.5, 0.05, 1e-4))]) is None
    assert policy.choose(10.0, 1000, [option(line=Line(6.0, 0.05, 1e-4))]) is not None


def test_a_cluster_that_cannot_serve_passes_to_whoever_can() -> None:
    assert Passing().choose(None, 1000, [option(line=BUSY)]) is not None
    assert Passing().choose(None, 1000, []) is None


def test_a_cached_prefix_is_worth_the_way() -> None:
    policy = Passing()
    long = Line(0.0, 0.05, 1e-3)
    assert policy.choose(8.0, 8000, [option(line=long)]) is None  # it would be computed there as well
    chosen = policy.choose(8.0, 8000, [option(line=long), option("knows", 0.2, long, cached=7680)])
    assert chosen is not None and chosen.name == "knows" and chosen.ttft < 1.0


def test_what_was_passed_since_counts_before_it_is_told() -> None:
    policy = Passing()
    passed = 0
    there = option(line=Line(0.0, 0.05, 1e-3), workers=2)
    while policy.choose(4.0, 1000, [there]) is not None:
        there.sent += 1000
        passed += 1
    # Two workers, a second each: not everybody goes there until the next look.
    assert 1 <= passed <= 8


def test_deadlines_go_before_margins_and_nothing_is_passed_to_be_late() -> None:
    policy = Passing()
    slower = option(line=Line(0.6, 0.05, 1e-4))
    assert policy.choose(1.0, 1000, [slower]) is None
    assert policy.choose(1.0, 1000, [slower], left=0.9) is not None
    assert policy.choose(1.0, 1000, [slower], left=0.5) is None
    assert policy.choose(None, 1000, [option(line=BUSY)], left=1.0) is None


lines = st.builds(Line, st.floats(0, 100), st.floats(0, 5), st.floats(0, 0.01))
options = st.lists(
    st.builds(
        Option,
        st.sampled_from("abcd"),
        st.floats(0, 3),
        lines,
        st.integers(0, 20_000),
        st.integers(0, 100_000),
        st.integers(1, 64),
    ),
    max_size=4,
)
lefts = st.none() | st.floats(0.01, 60)


@given(st.floats(0, 200), st.integers(1, 50_000), options, lefts)
def test_what_is_passed_is_clearly_sooner_or_saves_a_deadline(own, prompt, found, left) -> None:
    policy = Passing()
    chosen = policy.choose(own, prompt, found, left)
    if chosen is None:
        return
    assert chosen.ttft == min(policy.ttft(one, prompt) for one in found)
    if left is not None and own > left:
        assert chosen.ttft < left
    else:
        assert chosen.ttft < own - policy.config.margin_s
        assert chosen.ttft <= own * (1 - policy.config.share)


@given(st.none() | st.floats(0, 200), st.integers(1, 50_000), options, st.integers(0, 3), st.floats(0, 50))
def test_who_is_busier_or_farther_is_chosen_no_sooner(own, prompt, found, at, more) -> None:
    policy = Passing()
    before = policy.choose(own, prompt, found)
    if at >= len(found):
        return
    one = found[at]
    found[at] = Option(one.name, one.latency + more, one.line, one.cached, one.sent, one.workers)
    after = policy.choose(own, prompt, found)
    if after is not None:
        assert before is not None and before.ttft <= after.ttft


@given(lines, lines, st.integers(1, 50_000), st.floats(0, 3))
def test_two_clusters_never_exchange_the_same_request(a: Line, b: Line, prompt: int, latency: float) -> None:
    """If the one passes a request to the other, the other would not pass it back, whatever both have told."""
    policy = Passing()
    to_b = policy.choose(a.ttft(prompt), prompt, [Option("b", latency, b)])
    to_a = policy.choose(b.ttft(prompt), prompt, [Option("a", latency, a)])
    assert to_a is None or to_b is None


def test_a_cluster_of_equals_stays_calm_however_old_its_news_are() -> None:
    """Three clusters with equal load, of which each sees the others as they were a second ago: nothing is passed."""
    policy, draw = Passing(), random.Random(4)
    waits = [0.0, 0.0, 0.0]
    told = list(waits)
    passed = 0
    for step in range(3000):
        waits = [max(0.0, wait - 0.01) for wait in waits]
        if step % 100 == 0:
            told = list(waits)
        own = draw.randrange(3)
        if draw.random() < 0.25:
            others = [option(str(i), 0.02, Line(told[i], 0.02, 1e-5)) for i in range(3) if i != own]
            chosen = policy.choose(waits[own] + 0.03, 1000, others)
            passed += chosen is not None
            waits[own if chosen is None else int(chosen.name)] += 0.1
    assert passed < 0.05 * 750
    assert not math.isnan(sum(waits))
