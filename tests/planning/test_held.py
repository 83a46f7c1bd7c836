"""A plan agrees with what a worker on a CPU then really allocates: counted where weights and cache lie, and of a step
from the first operator to the last.
"""

from __future__ import annotations

import pytest

from benchmarks.engine.planned import compare, every, worst, write
from tests.variants import some

# Small Gemmas 4 have linears that are none of attention and MLPs; what sees is packed and rounded as the rest is.
FAMILIES = ["llama, tied", "qwen3 moe", "deepseek", "granite hybrid", "gemma4", "gemma4 moe", "kimi", "llava"]
FAMILIES += ["deepseek v3.2", "glm 5", "glm 5.3 flash"]


@pytest.mark.parametrize(
    "family", some(FAMILIES, "llama, tied", "deepseek", "granite hybrid", "gemma4", "kimi", "glm 5")
)
def test_a_plan_agrees_with_a_worker(one_thread, tmp_path, family):
    found = compare(write(tmp_path, family), family, "bfloat16", "none")
    assert (found.weights, found.tokens, found.cache) == pytest.approx((1, 1, 1), abs=0.02)


@pytest.mark.slow
def test_plans_agree_with_workers_of_many_models_and_settings(one_thread):
    """Of 72 models and settings, 95 in a hundred differ by less than two percent. No step takes more than is planned,
    and none less than half of it.
    """
    found = list(every())
    assert len(found) == 72 and worst(found) <= 0.02, sorted(each.weights for each in found)
    for each in found:
        assert each.tokens == each.cache == 1, each
        assert each.activations is None or 1 <= each.activations <= 2, each
    assert sum(each.activations is not None for each in found) >= 8
