"""What of an adapter each stage takes, and what rank 0 refuses for all of them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import AdapterWeights, Delta
from serve_app.kernels.linear.base import PlainLinear
from serve_app.models.divided.adapters import PartBank
from serve_app.models.divided.division import bare, divide
from serve_app.models.linears import Place as LinearPlace
from serve_app.parallel.place import Place
from tests import tiny

OWN, OTHER = "model.layers.0.self_attn.q_proj", "model.layers.2.self_attn.q_proj"


def bank(place: Place, name: str) -> PartBank:
    division = divide(bare(LlamaForCausalLM, LlamaConfig(**tiny.COMMON)), place)
    found, rows = PartBank(2, torch.device("cpu"), division), 64 // place.tensor
    found.plug(LinearPlace((name,), (rows,), 64), PlainLinear(torch.zeros(rows, 64), None))
    return found


def delta(n: int, k: int = 64) -> Delta:
    return Delta(torch.ones(3, k), torch.arange(3.0 * n).view(n, 3), 1.0)


@pytest.mark.parametrize("tensor", [1, 2])
def test_each_stage_takes_what_is_for_its_layers(tensor):
    first, last = bank(Place(tensor, 2, 0), OWN), bank(Place(tensor, 2, tensor), OTHER)
    assert [(linear.name, linear.outputs, linear.inputs) for linear in last.whole_linears] == [(OTHER, 64, 64)]
    first.learn(last.whole_linears)
    weights = AdapterWeights(3, {OWN: delta(64), OTHER: delta(64)})
    for one in (first, last):
        [[own]] = one.arranged(weights)
        assert own is not None and torch.equal(own.b, delta(64).b[: 64 // tensor])
    assert first.arranged(AdapterWeights(3, {OTHER: delta(64)})) == [[None]]


def test_rank_0_refuses_what_does_not_fit_another_stage():
    first = bank(Place(1, 2, 0), OWN)
    with pytest.raises(AdapterRefused, match="is no linear of this model that takes an adapter"):
        first.arranged(AdapterWeights(3, {OTHER: delta(64)}))
    first.learn(bank(Place(1, 2, 1), OTHER).whole_linears)
    with pytest.raises(AdapterRefused, match=r"has A \[3, 64\] and B \[32, 3\], and the model takes .* \[64, r\]"):
        first.arranged(AdapterWeights(3, {OTHER: delta(32)}))
