"""Ranks hold of published models what a plan says, by the rules by which they read their parts."""

from __future__ import annotations

from functools import cache

import pytest

from serve_app.models.divided import division
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.parallel.place import Place
from serve_app.planning.described import full_config, without_weights
from serve_app.planning.ranks import DoesNotDivide, Split, check_split, divide
from serve_app.planning.source import plan_model, published
from tests.variants import some

RANKS = [1, 2, 4, 8]
NAMES = some(sorted(published()), "kimi-k2.5", "gemma-4-26b-a4b-it")


def in_16_bits(name):
    return {key: value for key, value in published()[name].items() if key != "quantization_config"}


@cache
def built(name):
    config = in_16_bits(name)
    module = without_weights(config, full_config(config))
    module.tie_weights()
    return module, plan_model(name, config, [], item=2)


def bytes_of_rank_0(module, found):
    """Of its parameters in 16 bits, as ranks cut them when they load."""
    total = 0
    for name, weight in module.named_parameters():
        share = found.place.tensor if name in found.cuts else found.few.get(name.rpartition(".")[0], 1)
        total += 2 * weight.numel() // share
    return total


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_reads_what_is_planned(name, ranks):
    module, model = built(name)
    for experts in (False, True) if model.experts and ranks > 1 else (False,):
        split = Split(ranks, expert=experts)
        try:
            check_split(model, split)
        except DoesNotDivide:
            with pytest.raises(UnsupportedModel):
                division.divide(module, Place(ranks, whole_experts=experts))
            continue
        held = bytes_of_rank_0(module, division.divide(module, Place(ranks, whole_experts=experts)))
        [rank] = divide(model, split, batch_tokens=1, sampled=1)
        assert rank.weight_bytes == pytest.approx(held, rel=0.001)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_are_cut_where_they_are_planned(name, stages):
    """Whether experts lie in four bits or sixteen."""
    module, _ = built(name)
    model = plan_model(name, published()[name], [], item=2)
    planned = [(rank.first, rank.last) for rank in divide(model, Split(1, stages), batch_tokens=1, sampled=1)]
    assert planned == division.divide(module, Place(1, stages)).stages
