"""The one measurement of an engine's steps: samples, a mean, and what a prompt token takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from serve_app.engine.meter import KEPT, StepMeter


def item(start: int, count: int, prompt_len: int) -> SimpleNamespace:
    return SimpleNamespace(start=start, count=count, request=SimpleNamespace(prompt_len=prompt_len))


def test_a_step_is_told_by_what_it_computed_and_only_once() -> None:
    meter = StepMeter()
    meter.record([item(64, 32, 200), item(100, 1, 40), item(50, 3, 50)], 0.25)
    assert meter.take() == [(32, 64, 2, 150, 0.25)] and meter.take() == []
    for number in range(2 * KEPT):
        meter.record([item(number, 1, 1)], 0.01)
    assert [sample[3] for sample in meter.take()] == list(range(KEPT, 2 * KEPT))
    assert meter.mean_seconds == pytest.approx(0.01, rel=1.0)


def test_prompt_tokens_a_second_come_from_steps_that_are_mostly_prompt() -> None:
    meter = StepMeter()
    assert meter.prefill.value is None
    meter.record([item(0, 16, 16)], 1.0)  # too short
    meter.record([item(0, 40, 40), item(100, 50, 40)], 1.0)  # mostly drafts under verification
    assert meter.prefill.value is None
    meter.record([item(0, 500, 1000), item(100, 1, 40)], 0.5)
    assert meter.prefill.value == pytest.approx(1000)
