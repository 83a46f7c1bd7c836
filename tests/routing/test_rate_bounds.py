"""No workers can do more than what their time has room for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.trace.engine import decode_cost, prefill_alone
from benchmarks.trace.ideal import known_rate, rate_bounds, work
from benchmarks.trace.requests import TraceRequest
from benchmarks.trace.spec import ClusterSpec


def test_a_request_takes_no_less_than_its_steps() -> None:
    kv, cost = 1_000_000, decode_cost("linear", 1_000_000)
    prompt = TraceRequest("a", 0.0, 50_000, 0, ())
    # No chunk makes it cheaper, and the cheapest comes close.
    least = work(prompt, 50_000, cost, kv)
    assert 0.9999 * least < min(prefill_alone(50_000, c) for c in (1000, 2048, 4096, 6250, 8192, 50_000)) < 1.02 * least
    # A hundred streams of 10,000 tokens fill the worker: each has a hundredth of every step.
    stream = TraceRequest("b", 0.0, 9_900, 200, ())
    assert work(stream, 0, cost, kv) == pytest.approx(200 * (cost.base + cost.token * kv) / 100)


def test_without_the_dearest_requests_there_is_time_for_more() -> None:
    cost = decode_cost("mocker", 1_000_000)
    trace = [TraceRequest(str(n), float(n), 100_000 if n == 5 else 1000, 10, ()) for n in range(10)]
    missed = [r.prompt for r in trace]
    everything, most = rate_bounds(trace, missed, 4, cost, 1_000_000, 0.9)
    seconds = [work(r, m, cost, 1_000_000) for r, m in zip(trace, missed, strict=True)]
    assert everything == pytest.approx(4 * 9.0 / sum(seconds))
    assert most == pytest.approx(4 * 9.0 / (9 * seconds[0])) and most > 5 * everything


def test_who_knows_everything_is_bound_by_time_and_targets() -> None:
    draw = random.Random(5)
    trace = [TraceRequest(str(n), float(n), draw.choice((500, 2000, 30_000)), 50, ()) for n in range(3000)]
    missed = [request.prompt for request in trace]
    spec = ClusterSpec(workers=4)
    cost = decode_cost(spec.decode_cost, spec.kv_tokens)
    _, most = rate_bounds(trace, missed, 4, cost, spec.kv_tokens, 0.9)
    hasty, patient = (known_rate(trace, missed, replace(spec, ttft_target=s), "recorded", 0.9) for s in (0.7, 5.0))
    # Steps are dearer than at their cheapest size, and what ends late is computed in part.
    assert 0.3 * most < hasty < patient < 1.1 * most
    # A prompt of 30,000 tokens takes 0.6 s: of these nobody has any in time.
    assert known_rate(trace, missed, replace(spec, ttft_target=0.3), "recorded", 0.9) < 0.1
