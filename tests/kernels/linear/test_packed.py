from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from serve_app.kernels.linear.packed import PackedLinear, pack_linears, packing_available

DTYPES = [torch.float32, torch.bfloat16]


def packable(dtype: torch.dtype) -> None:
    if not packing_available(dtype):
        pytest.skip(f"this torch build cannot pack {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(864, 320), (320, 864), (7, 5), (1000, 64)])
@torch.inference_mode()
def test_equals_linear(dtype: torch.dtype, bias: bool, shape: tuple[int, int]) -> None:
    packable(dtype)
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=bias).to(dtype)
    packed = PackedLinear(linear.weight, linear.bias)
    assert torch.equal(packed.weight, linear.weight)
    for rows in ((1,), (3,), (1, 33), (2, 5), (0,)):
        x = torch.randn(*rows, shape[1]).to(dtype)
        tolerance = 1e-5 if dtype is torch.float32 else 8e-3
        torch.testing.assert_close(packed(x), F.linear(x, linear.weight, linear.bias), atol=tolerance, rtol=tolerance)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32)) for _ in range(2))
        self.router = nn.Linear(32, 4)
        self.lm_head = nn.Linear(32, 50, bias=False)
        self.lm_head.weight = self.embed.weight
        self.again = self.layers[0][0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x) + self.router(x).sum() + self.again(x).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_model_with_tied_head_and_shared_module(dtype: torch.dtype) -> None:
    packable(dtype)
    torch.manual_seed(0)
    model, ids = Model().to(dtype), torch.arange(9)
    want = model(ids)
    report = pack_linears(model, exclude=["*router"])
    assert report.packed == 5 and report.skipped == {"router": "excluded"}
    assert isinstance(model.lm_head, PackedLinear) and type(model.router) is nn.Linear
    assert model.again is model.layers[0][0]
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(model(ids), want, atol=tolerance, rtol=tolerance)
    remaining = {name for name, _ in model.named_parameters()}
    assert remaining == {"embed.weight", "router.weight", "router.bias"}


def _conv1d(inputs: int, outputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


def _falcon_linear(inputs: int, outputs: int) -> nn.Module:
    from transformers.models.falcon.modeling_falcon import FalconLinear

    return FalconLinear(inputs, outputs)


@pytest.mark.parametrize("make", [_conv1d, _falcon_linear])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_linears_of_other_classes(make: Callable[[int, int], nn.Module], dtype: torch.dtype) -> None:
    packable(dtype)
    torch.manual_seed(0)
    model = nn.Sequential(make(32, 96), nn.GELU(), make(96, 32)).to(dtype)
    x = torch.randn(2, 7, 32).to(dtype)
    want = model(x)
    assert pack_linears(model).packed == 2 and not list(model.parameters())
    tolerance = 1e-5 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(model(x), want, atol=tolerance, rtol=tolerance)


def test_what_cannot_be_packed_stays() -> None:
    packable(torch.float32)
    model = nn.Sequential(nn.Linear(8, 8).half(), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda *_: None)
    report = pack_linears(model)
    assert report.packed == 0 and set(report.skipped) == {"0", "1"}
    assert report.skipped["1"] == "has hooks" and "cannot pack" in report.skipped["0"]


def test_a_disagreeing_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    packable(torch.float32)
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: right(self, x) * 1.01)
    model = nn.Sequential(nn.Linear(8, 8))
    report = pack_linears(model)
    assert report.packed == 0 and "differs" in report.skipped["0"] and type(model[0]) is nn.Linear
