"""The model of a step: sensible before it has seen anything, right after it has, and never upset by nonsense."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.costs.steps import StepModel, StepSample
from serve_app.routing.costs import CostPriors

TRUTH = {"p0": 0.02, "p1": 6e-5, "p2": 8e-10, "d0": 0.015, "d1": 1e-4, "d2": 2e-7}


def model() -> StepModel:
    return StepModel(CostPriors().steps())


def true_seconds(step: StepSample) -> float:
    t = TRUTH
    prefill = t["p0"] + step.prefill_tokens * t["p1"]
    prefill += t["p2"] * step.prefill_tokens * (step.context_tokens + step.prefill_tokens / 2)
    decode = t["d0"] + t["d1"] * step.decode_seqs + t["d2"] * step.kv_tokens
    return prefill * (step.prefill_tokens > 0) + decode * (step.decode_seqs > 0)


def a_step(draw: random.Random) -> StepSample:
    n = draw.choice([0, 0, draw.randint(1, 2048)])
    b = draw.choice([0, draw.randint(1, 64)]) if n else draw.randint(1, 64)
    step = StepSample(n, draw.randint(0, 8000) if n else 0, b, b * draw.randint(100, 4000), 1.0)
    return StepSample(step.prefill_tokens, step.context_tokens, b, step.kv_tokens, true_seconds(step))


@pytest.mark.slow
def test_the_model_learns_another_machine_and_stays_right_for_long() -> None:
    draw = random.Random(3)
    costs = model()
    for _ in range(20_000):
        step = a_step(draw)
        noisy = StepSample(*[getattr(step, f) for f in StepSample.__slots__][:4], step.seconds * draw.gauss(1, 0.03))
        costs.observe([noisy])
    for tokens, context in ((512, 0), (2048, 4000)):
        expected = true_seconds(StepSample(tokens, context, 0, 0, 0.0))
        assert costs.prefill_seconds(tokens, context, 2048) == pytest.approx(expected, rel=0.1)
    for batch, kv in ((1, 500), (32, 60_000), (64, 200_000)):
        expected = true_seconds(StepSample(0, 0, batch, kv, 0.0))
        assert costs.decode_seconds(batch, kv) == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_one_kind_of_step_for_days_unlearns_nothing_else() -> None:
    """Directions that no sample excites must not drift away: a decode worker sees no prompts."""
    draw = random.Random(4)
    costs = model()
    costs.observe([a_step(draw) for _ in range(3000)])
    before = costs.prefill_seconds(2000, 1000)
    step = StepSample(0, 0, 8, 16_000, 0.0)
    costs.observe([StepSample(0, 0, 8, 16_000, true_seconds(step) * draw.gauss(1, 0.02)) for _ in range(30_000)])
    assert costs.prefill_seconds(2000, 1000) == pytest.approx(before, rel=0.05)


@given(
    st.lists(
        st.builds(
            StepSample,
            st.integers(-5, 10**6),
            st.integers(0, 10**6),
            st.integers(0, 10**4),
            st.integers(0, 10**8),
            st.floats(-1.0, 1e4, allow_nan=False),
        ),
        max_size=50,
    )
)
@settings(max_examples=50, deadline=None)
def test_predictions_stay_positive_and_finite_whatever_is_reported(steps: list[StepSample]) -> None:
    costs = model()
    costs.observe(steps, worker="w")
    assert 0 < costs.prefill_seconds(1000) < 1e9
    assert 0 < costs.decode_seconds(8, 8000) < 1e9
    assert 0.2 < costs.slowness("w") < 5


def test_a_slow_worker_is_known_as_slow() -> None:
    costs, draw = model(), random.Random(5)
    for _ in range(4000):
        step = a_step(draw)
        costs.observe([step], worker="good")
        if draw.random() < 0.2:
            costs.observe([StepSample(step.prefill_tokens, step.context_tokens, step.decode_seqs, step.kv_tokens,
                                      step.seconds * 1.5)], worker="slow")  # fmt: skip
    assert costs.slowness("slow") > 1.3 * costs.slowness("good")
    costs.forget("slow")
    assert costs.slowness("slow") == 1.0
