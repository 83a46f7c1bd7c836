"""Linears in panels give what ``F.linear`` gives, whatever the shape, the number of rows and of threads."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from serve_app.kernels.linear import panels
from serve_app.kernels.linear.panels import Arena, PanelLinears, PanelStore, panel_bytes, panel_library
from serve_app.kernels.linear.quantize import quantize
from serve_app.kernels.shapes import ShapeMismatch

pytestmark = pytest.mark.skipif(panel_library() is None, reason="needs a compiler and AVX512_BF16")


def weights(count: int, n: int, k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    return [(torch.randn(n, k, generator=generator) * k**-0.5).bfloat16() for _ in range(count)]


def packed(given: list[torch.Tensor], biases: list[torch.Tensor | None], compact: bool) -> PanelLinears:
    library = panel_library()
    assert library is not None
    return PanelLinears(PanelStore(library, panel_bytes(torch.stack(given)), compact=compact), given, biases)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (7, 6), (64, 32), (100, 130), (200, 1100)])
@torch.inference_mode()
def test_equals_linear(shape: tuple[int, int], compact: bool, threads: int) -> None:
    [weight] = weights(1, *shape)
    bias = torch.linspace(-2, 2, shape[0]).bfloat16()
    for given in (None, bias):
        linear = packed([weight], [given], compact)
        assert torch.equal(linear.weight(), weight)
        # 6, 8, 12, 48 and 192 are where the passes over a panel change.
        for rows in ((), (1,), (2, 3), (7,), (8,), (9,), (12,), (13,), (48,), (49,), (193,), (2, 99), (385,), (0,)):
            x = torch.randn(*rows, shape[1], generator=torch.Generator().manual_seed(len(rows))).bfloat16()
            close(linear(x), F.linear(x.float(), weight.float(), None if given is None else given.float()).bfloat16())


@pytest.mark.parametrize("compact", [False, True])
@torch.inference_mode()
def test_a_rows_result_does_not_depend_on_the_others(compact: bool, threads: int) -> None:
    linear = packed(weights(1, 130, 1090), [None], compact)
    x = torch.randn(400, 1090, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = torch.cat([linear(x[i : i + 1]) for i in range(400)])
    for rows in (2, 6, 7, 8, 12, 13, 48, 50, 192, 197, 400):
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows


def four_bits(n: int, k: int) -> torch.Tensor:
    """As MXFP4 checkpoints have them once they are bfloat16: whole groups of zeros, and both zeros, among them."""
    generator = torch.Generator().manual_seed(n + k)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = table[torch.randint(0, 8, (n, k // 32, 32), generator=generator)]
    values *= torch.where(torch.rand(values.shape, generator=generator) < 0.5, -1.0, 1.0)
    scale = 2.0 ** torch.randint(-9, -4, (n, k // 32, 1), generator=generator)
    scale[0, 0] = 0
    return (values * scale).view(n, k).bfloat16()


@pytest.mark.parametrize("shape", [(1, 32), (64, 64), (100, 160), (200, 1120)])
@torch.inference_mode()
def test_floats_of_four_bits(shape: tuple[int, int], threads: int) -> None:
    """They take a quarter, and give the same to the last bit whatever the number of rows."""
    weight = four_bits(*shape)
    linear = packed([weight], [torch.ones(shape[0]).bfloat16()], True)
    assert linear.store.bytes == -(-shape[0] // 64) * 64 * shape[1] * 17 // 32
    assert torch.equal(linear.weight(), weight)
    x = torch.randn(400, shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = torch.cat([linear(x[i : i + 1]) for i in range(0, 400, 7)])
    for rows in (0, 1, 4, 5, 8, 9, 12, 48, 192, 193, 400):
        got = linear(x[:rows])
        close(got, (F.linear(x[:rows].float(), weight.float()) + 1).bfloat16())
        assert torch.equal(got[::7], alone[: len(got[::7])]), rows


def test_what_four_bits_do_not_hold_is_not_packed_so() -> None:
    for value in (1.25, 0.125, 12.0, float("inf"), float("nan"), 2.0**-126, 2.0**127):
        weight = four_bits(64, 64)
        weight[3, :32] = 1.0
        weight[3, 5] = value
        weight[3, 6] = 6.0 if value < 1 else 1.0
        if value == 12.0:
            weight[3, 6] = 0.5
        assert packed([weight], [None], True).store.bytes > 64 * 64


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_experts(bias: bool, compact: bool, threads: int) -> None:
    given = weights(5, 70, 66)
    biases: list[torch.Tensor | None] = [torch.full((70,), float(i)).bfloat16() if bias else None for i in range(5)]
    experts = packed(given, biases, compact)
    generator = torch.Generator().manual_seed(3)
    for tokens, choices in ((1, 1), (1, 4), (3, 2), (40, 3), (250, 1)):
        x = torch.randn(tokens, 66, generator=generator).bfloat16()
        chosen = torch.randint(0, 4, (tokens, choices), generator=generator)  # nobody goes to the last
        got = experts(x, chosen.view(-1)).view(tokens, choices, 70)
        for t in range(tokens):
            for c, e in enumerate(chosen[t].tolist()):
                close(
                    got[t, c],
                    F.linear(x[t].float(), given[e].float(), None if not bias else biases[e].float()).bfloat16(),
                )
    assert experts(torch.empty(0, 66).bfloat16(), torch.empty(0, dtype=torch.int64)).shape == (0, 70)


@torch.inference_mode()
def test_strided_rows_are_taken() -> None:
    [weight] = weights(1, 64, 32)
    linear = packed([weight], [None], False)
    x = torch.randn(9, 64).bfloat16()
    close(linear(x[:, 16:48]), F.linear(x[:, 16:48].float(), weight.float()).bfloat16())
    close(linear(x.t()[:32].t()), F.linear(x[:, :32].float(), weight.float()).bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    linear = packed(weights(2, 64, 32), [None, None], False)
    x = torch.zeros(3, 32).bfloat16()
    for wrong in (x.float(), torch.zeros(3, 30).bfloat16(), torch.zeros(32, 3).bfloat16()):
        with pytest.raises(ShapeMismatch, match="a linear of 32 columns"):
            linear(wrong)
    for chosen in (torch.tensor([0, 1]), torch.tensor([0, 1, 0], dtype=torch.int32)):
        with pytest.raises(ValueError, match="choices"):
            linear(x, chosen)
    for chosen in (torch.tensor([0, 2, 0]), torch.tensor([0, -1, 0])):
        with pytest.raises(ValueError, match="an expert that there is not"):
            linear(x, chosen)
    with pytest.raises(ShapeMismatch, match="do not fit panels"):
        packed(weights(1, 8, 7), [None], False)


def test_an_arena_grows() -> None:
    arena, size = Arena(100), 90 << 10
    places = [arena.take(size) for _ in range(100)]
    assert all(place % 64 == 0 for place in places) and len(arena._maps) > 1
    for number, place in enumerate(places):
        ctypes.memset(place, number, size)
    assert all(ctypes.string_at(place, size) == bytes([number]) * size for number, place in enumerate(places))


def test_large_weights_are_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    given = weights(1, 128, 256)
    library = panel_library()
    assert library is not None
    for limit, share in ((0, 0.8), (1 << 30, 1.0)):
        monkeypatch.setattr(panels, "COMPACT_ABOVE_BYTES", limit)
        store = PanelStore(library, panel_bytes(given[0]))
        PanelLinears(store, given, [None])
        assert store.bytes <= share * panel_bytes(given[0])


needs_vnni = pytest.mark.skipif(panel_library(quantized=True) is None, reason="needs AVX512_VNNI")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows in 8 bits, as ``cpu/quantized.h`` has them."""
    grouped = x.float().unflatten(-1, (-1, 64))
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    return ((grouped / scale.clamp_min(1e-30)).round() * scale).flatten(-2)


@needs_vnni
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(1, 64), (64, 128), (100, 1088)])
@torch.inference_mode()
def test_fewer_bits(shape: tuple[int, int], bits: int, threads: int) -> None:
    """Codes are multiplied with rows in 8 bits, and a row's result does not depend on the others."""
    n, k = shape
    codes, bias = quantize(weights(1, n, k)[0], bits), torch.linspace(-2, 2, n).bfloat16()
    store = PanelStore(panel_library(), panel_bytes(torch.empty(n, k)))
    linear = PanelLinears(store, [codes], [bias])
    assert store.bytes == -(-n // 64) * 64 * codes.row_bytes
    x = torch.randn(400, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = (F.linear(rounded(x), codes.dequantize(torch.float32)) + bias.float()).bfloat16()
    alone = torch.cat([linear(x[i : i + 1]) for i in range(0, 400, 7)])
    for rows in (0, 1, 6, 7, 17, 48, 193, 400):
        got = linear(x[:rows])
        close(got, want[:rows])
        assert torch.equal(got[::7], alone[: len(got[::7])]), rows


@needs_vnni
@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_experts_in_fewer_bits(bits: int, threads: int) -> None:
    codes = [quantize(weight, bits) for weight in weights(5, 70, 128)]
    biases: list[torch.Tensor | None] = [torch.full((70,), float(i)).bfloat16() for i in range(5)]
    experts = PanelLinears(PanelStore(panel_library(), 1 << 20), codes, biases)
    generator = torch.Generator().manual_seed(3)
    for tokens, choices in ((1, 1), (3, 2), (250, 1)):
        x = torch.randn(tokens, 128, generator=generator).bfloat16()
        chosen = torch.randint(0, 4, (tokens, choices), generator=generator)
        got = experts(x, chosen.view(-1)).view(tokens, choices, 70)
        for t in range(0, tokens, 9):
            for c, e in enumerate(chosen[t].tolist()):
                close(got[t, c], (F.linear(rounded(x[t]), codes[e].dequantize(torch.float32)) + e).bfloat16())
    with pytest.raises(ShapeMismatch, match="differ in their bits"):
        PanelLinears(experts.store, [codes[0], quantize(weights(1, 70, 128)[0], 12 - bits)], biases[:2])
