"""Routed experts in Triton against torch, by the same check that a GPU runs, and what a captured graph counts on."""

import dataclasses

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from serve_app.kernels.experts import Experts
from serve_app.kernels.gpu import selftest
from serve_app.kernels.mixture import Gate
from serve_app.kernels.reference.operators import TORCH
from serve_app.models.loading.miniature import build, scale_down
from serve_app.models.loading.optimise import _route_experts
from serve_app.models.mixtures.scaled import ScaledExperts, route_scaled
from tests import tiny
from tests.parallel.test_divided import generate, prompts
from tests.variants import some


@pytest.mark.parametrize("dtype", some(selftest.TOLERANCE))
def test_equal_to_torch(dtype: torch.dtype, device: torch.device) -> None:
    from serve_app.kernels.gpu.backend import triton_operators

    allowed = 1e-5 if dtype == torch.float32 else selftest.TOLERANCE[dtype]
    assert selftest.check_experts(triton_operators(), dtype, device) < allowed


@pytest.mark.parametrize("rows", some([7, 70], 7))
@pytest.mark.parametrize("one", [True, False])
def test_any_routing_fits_the_grid(rows: int, one: bool, device: torch.device) -> None:
    """All rows choose the same experts, or rows choose as differently as they can: the grid is the same."""
    from serve_app.kernels.gpu.experts import mix_experts

    torch.manual_seed(0)
    gate, up, down = (torch.randn(6, *size, device=device) * 0.2 for size in ((16, 24), (16, 24), (24, 16)))
    experts = Experts(gate, up, down, None, None, None, Gate())
    x, weights = torch.randn(rows, 24, device=device), torch.rand(rows, 2, device=device)
    first = torch.full((rows,), 4) if one else torch.arange(rows) % 6
    index = torch.stack([first, (first + 1) % 6], 1).to(device)
    got = mix_experts(x, index, weights, experts)
    torch.testing.assert_close(got, TORCH.mix_experts(x, index, weights, experts), atol=1e-5, rtol=1e-5)
    assert torch.equal(got, mix_experts(x, index, weights, experts))


@pytest.mark.parametrize("block", [16, 64])
def test_tiles_hold_every_pair_once(block: int) -> None:
    from serve_app.kernels.gpu.experts import sort_pairs

    for experts, choices, rows in ((8, 2, 100), (128, 8, 70), (4, 4, 65)):
        scores = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows))
        index = scores.topk(choices).indices
        order, starts, firsts, most = sort_pairs(index, experts, block)
        assert order.sort().values.tolist() == list(range(rows * choices))
        assert firsts[-1] <= most and starts[-1] == rows * choices
        for expert in range(experts):
            assert (index.reshape(-1)[order[starts[expert] : starts[expert + 1]]] == expert).all()


@pytest.mark.parametrize("fails", [False, True])
def test_wrong_experts_leave_the_other_kernels(fails: bool, device: torch.device) -> None:
    from serve_app.kernels.gpu.backend import _with_experts

    def wrong(*args):
        if fails:
            raise ValueError("out of resource: shared memory")
        return TORCH.mix_experts(*args) + 0.5

    other = dataclasses.replace(TORCH, name="triton", mix_experts=wrong)
    found, why = _with_experts(other, device)
    assert found == dataclasses.replace(other, mix_experts=TORCH.mix_experts)
    assert ("out of resource" if fails else "experts in torch.float32 differs") in why


@torch.inference_mode()
def test_rows_that_are_weighed_before_their_experts(interpreted, monkeypatch, device: torch.device) -> None:
    """Llama 4's, of which transformers computes all for every row."""
    from serve_app.kernels.gpu import experts

    model = build(Llama4ForCausalLM, scale_down(Llama4TextConfig(num_hidden_layers=2), num_experts_per_tok=2))
    block = model.to(device).model.layers[1].feed_forward
    x = torch.randn(5, model.config.hidden_size, device=device)
    (wanted, logits), calls, real = block(x), [], experts.mix_experts

    def counted(rows, *more):
        calls.append(len(rows))
        return real(rows, *more)

    monkeypatch.setattr(experts, "mix_experts", counted)
    assert route_scaled(block) == 4
    torch.testing.assert_close(block(x), (wanted, logits), atol=1e-5, rtol=1e-5)
    assert calls[-1] == 10


@pytest.mark.slow
def test_their_greedy_tokens_equal_transformers(tmp_path, interpreted, monkeypatch, device: torch.device) -> None:
    path = tiny.write_small(tmp_path, Llama4ForCausalLM, num_experts_per_tok=2)
    reference, asked = tiny.load_reference(path), prompts(2, 30)
    wanted = [tiny.reference_tokens(reference, prompt, 5) for prompt in asked]
    # As on a GPU, wherever tensors lie here.
    monkeypatch.setattr("serve_app.models.loading.optimise._replace_modules", _route_experts)
    model = tiny.load(path, device=str(device), optimise=True)
    mixtures = [module for module in model.module.modules() if isinstance(module.forward, ScaledExperts)]
    assert mixtures and model.report["experts"] == f"{4 * len(mixtures)} by their numbers"
    assert generate(tiny.make_engine(model, num_blocks=20, max_batch_tokens=23), asked, max_tokens=5) == wanted
