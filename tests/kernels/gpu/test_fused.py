"""The fused operators against torch, by the same check that a GPU runs when it is first used."""

import dataclasses

import pytest
import torch

from serve_app.kernels.gpu import selftest
from serve_app.kernels.reference.operators import TORCH
from tests.variants import some


@pytest.fixture(scope="module")
def triton():
    from serve_app.kernels.gpu.backend import triton_operators

    return triton_operators()


@pytest.mark.parametrize("dtype", some(selftest.TOLERANCE, torch.float32))
def test_equal_to_torch(triton, dtype: torch.dtype, device: torch.device) -> None:
    assert selftest.check_fused(triton, dtype, device) < selftest.TOLERANCE[dtype]
    assert selftest.check_attention(triton, dtype, device) < selftest.TOLERANCE[dtype]


@pytest.mark.parametrize("broken", ["add_rms_norm", "swiglu", "rotate_and_write", "attention", "write_kv"])
def test_the_check_finds_a_wrong_operator(broken: str, device: torch.device) -> None:
    right = getattr(TORCH, broken)

    def wrong(*args, **options):
        result = right(*args, **options)
        for tensor in [result] if isinstance(result, torch.Tensor) else list(result or ()):
            tensor += 0.5
        if result is None:
            args[0].add_(0.5)
        return result

    with pytest.raises(RuntimeError, match="differs"):
        selftest.check(dataclasses.replace(TORCH, **{broken: wrong}), device)
    # On a GPU torch's own products are rounded otherwise than those of the CPU.
    assert selftest.check(TORCH, device) <= (0.0 if device.type == "cpu" else 0.02)


def test_drawing(triton, device: torch.device) -> None:
    selftest.check_drawing(triton, device)
    broken = dataclasses.replace(triton, draw_truncated=lambda *_: None)
    with pytest.raises(RuntimeError, match="were drawn"):
        selftest.check_drawing(broken, device)


def test_float8_cache(triton, device: torch.device) -> None:
    """Keys and values are rounded to e4m3 when written, and attention reads them as that."""
    from serve_app.kernels.gpu.selftest import move
    from serve_app.kernels.library.selftest import random_batch

    b = move(random_batch([1, 9, 1], [70, 33, 0], 4, 2, 32, torch.float32, 2), device)
    rounded = b.kv_layer.to(torch.float8_e4m3fn)
    want = TORCH.attention(b.q, rounded.float(), b, scale=0.2)
    torch.testing.assert_close(TORCH.attention(b.q, rounded, b, scale=0.2), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(triton.attention(b.q, rounded, b, scale=0.2), want, atol=1e-5, rtol=1e-5)
    k, v = torch.randn(2, 11, 2, 32, device=device)
    triton.write_kv(rounded, k, v, b.slots)
    wanted = b.kv_layer.to(torch.float8_e4m3fn)
    TORCH.write_kv(wanted, k, v, b.slots)
    got, wanted = rounded.float().nan_to_num(7), wanted.float().nan_to_num(7)
    # The interpreter cuts off where a GPU rounds (one step of three bits), and loses a carry in one of a thousand.
    wrong = (got - wanted).abs() > 0.13 * wanted.abs() + 2**-9
    assert wrong.float().mean() < (0.003 if device.type == "cpu" else 1e-6)
