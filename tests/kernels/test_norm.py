import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from serve_app.kernels.library.native import Library
from serve_app.kernels.norm import FastRMSNorm, replace_rms_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [LlamaRMSNorm, Gemma2RMSNorm])
@torch.inference_mode()
def test_equals_the_models_own_module(
    library: Library, threads: int, variant: type[nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(variant(96))
    nn.init.normal_(model[0].weight)
    model.to(dtype)
    # Both the single-threaded and the parallel size, and a strided input that goes to the original.
    inputs = [torch.randn(1, rows, 96).to(dtype) * 3 for rows in (1, 5, 900)]
    inputs.append(inputs[1].expand(2, 5, 96).transpose(0, 1))
    want = [model(x) for x in inputs]
    assert replace_rms_norms(model) == 1
    assert isinstance(model[0].forward, FastRMSNorm)
    for x, expected in zip(inputs, want, strict=True):
        got = model(x)
        if dtype is torch.float32:
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
        else:
            assert float((got != expected).float().mean()) < 0.005
            torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    assert set(dict(model.named_parameters())) == {"0.weight"}


class OddRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.01


def test_an_unknown_variant_keeps_its_forward(library: Library) -> None:
    model = nn.Sequential(OddRMSNorm(32), LlamaRMSNorm(20), nn.LayerNorm(32))
    assert replace_rms_norms(model) == 0
    assert not any("forward" in vars(m) for m in model)
