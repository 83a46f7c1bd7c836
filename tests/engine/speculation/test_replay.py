"""Recorded texts and costs, replayed on a simulated clock: what speculation earns, the same on every machine."""

from __future__ import annotations

import pytest

from benchmarks.speculation.ablation import LEAST, ratios
from tests.variants import some


@pytest.mark.slow
@pytest.mark.parametrize("costs", some(["recorded", "rows", "ahead"], "recorded"))
def test_prose_is_never_slower_than_plain_decoding(costs):
    assert min(ratios({}, [(costs, "ngram+draft", "prose", batch) for batch in (1, 4, 16)])) >= LEAST


def test_what_repeats_is_faster():
    code, tools, edit = ratios({}, [("recorded", "ngram+draft", kind, 1) for kind in ("code", "tools", "edit")])
    assert code > 1.8 and tools > 1.5 and edit > 3.5


def test_a_draft_model_helps_where_look_up_has_little_to_say():
    alone, together = ratios({}, [("weights", "ngram", "code", 1), ("weights", "ngram+draft", "code", 1)])
    assert together > 1.15 * alone


def test_without_the_loss_budget_looking_in_vain_would_cost():
    [without] = ratios({"debt": float("inf")}, [("ahead", "ngram+draft", "prose", 4)])
    assert without < 0.95
