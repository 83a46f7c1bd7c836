"""Random-data checks that the Triton kernels must pass on the device before they are used."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.coded import FLOAT4, FLOAT8, Coded, whole4
from serve_app.kernels.experts import Experts
from serve_app.kernels.library.selftest import RandomBatch, random_batch
from serve_app.kernels.linear.base import PlainLinear
from serve_app.kernels.linear.delta import AdapterLinear, Rows
from serve_app.kernels.linear.device_delta import DeviceAdapterLinear
from serve_app.kernels.linear.tiles import Tiles
from serve_app.kernels.mixture import Gate
from serve_app.kernels.operators import Operators
from serve_app.kernels.reference.operators import TORCH


@dataclasses.dataclass(slots=True)
class Matrices:
    """One module's adapter."""

    a: Tensor
    b: Tensor
    scale: float


@dataclasses.dataclass(slots=True)
class AdaptedBatch:
    """What a linear with adapters looks at in an ``engine.step.Batch``."""

    adapters: Tensor
    tiles: Tiles | None = None
    sampled_tiles: Tiles | None = None


# Per dtype, on values of about unit size.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@torch.inference_mode()
def check(found: Operators, device: torch.device) -> float:
    """Largest error of ``found`` against torch on ``device``. Raises RuntimeError when one is too large. Experts have a
    check of their own, :func:`check_experts`.
    """
    worst = 0.0
    for dtype in TOLERANCE:
        worst = max(worst, check_attention(found, dtype, device), check_fused(found, dtype, device))
        worst = max(worst, check_adapters(found, dtype, device))
    check_drawing(found, device)
    return worst


def check_attention(found: Operators, dtype: torch.dtype, device: torch.device) -> float:
    """A decode with splits, and a mixed batch with window, cap and sinks."""
    worst = 0.0
    for seed, (queries, contexts, window, softcap) in enumerate(
        [([1, 1, 1], [700, 0, 33], None, None), ([40, 1, 3], [9, 64, 31], 24, 30.0)]
    ):
        batch = random_batch(queries, contexts, 8, 2, 64, dtype, seed)
        sinks = torch.linspace(-1, 1, 8) if softcap else None
        options = {"scale": 0.125, "window": window, "softcap": softcap}
        moved = move(batch, device)
        on_device = None if sinks is None else sinks.to(device)
        got = found.attention(moved.q, moved.kv_layer, moved, sinks=on_device, **options)
        # On the CPU, where no setting of the process or its environment makes products of float32 less exact.
        want = TORCH.attention(batch.q, batch.kv_layer, batch, sinks=sinks, **options)
        worst = max(worst, _compare("paged attention", got.cpu(), want))
    return worst


def check_latents(found: Operators, dtype: torch.dtype, device: torch.device) -> float:
    """Latents of DeepSeek's size, which are keys and values in one."""
    worst = 0.0
    for seed, (queries, contexts) in enumerate([([1, 1, 1], [300, 0, 33]), ([40, 1, 3], [9, 64, 31])]):
        batch = random_batch(queries, contexts, 20, 1, 576, dtype, seed)
        latents = batch.kv_layer[:1]
        moved = move(batch, device)
        got = found.attention(moved.q, latents.to(device), moved, scale=0.05)
        want = TORCH.attention(batch.q, latents, batch, scale=0.05)
        worst = max(worst, _compare("attention over latents", got.cpu(), want))
    return worst


def check_fused(found: Operators, dtype: torch.dtype, device: torch.device) -> float:
    """The operators between the matrix products, with and without the optional parts."""
    worst = 0.0
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, delta, weight = random(5, 96), random(5, 96), random(96)
    for other in (None, delta):
        for got, want in zip(
            found.add_rms_norm(x, other, weight, 1e-6), TORCH.add_rms_norm(x, other, weight, 1e-6), strict=True
        ):
            worst = max(worst, _compare("RMS norm", got, want))
    gate_up = random(5, 80)
    worst = max(worst, _compare("SwiGLU", found.swiglu(gate_up), TORCH.swiglu(gate_up)))
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        worst = max(worst, check_float8(found, x))
    return max(worst, check_rotation(found, dtype, device))


def check_float8(found: Operators, x: Tensor) -> float:
    """Scales and codes of a few rows."""
    (codes, scale), (_, wanted) = found.quantize_rows(x), TORCH.quantize_rows(x)
    error = _compare("float8 scales", scale, wanted)
    near = (codes.float() * scale - x.float()).abs() <= 0.13 * x.float().abs() + scale * 2**-8
    # Triton's interpreter loses the carry into the exponent, which is due in one of about fifty values.
    if not float(near.float().mean()) >= (1.0 if x.is_cuda else 0.95):
        raise RuntimeError("self-test: float8 codes are not the nearest")
    return error


def check_adapters(found: Operators, dtype: torch.dtype, device: torch.device) -> float:
    """Rows of three adapters and of none, of two modules side by side, against torch's products."""
    if found.add_deltas is None:
        return 0.0
    generator = torch.Generator().manual_seed(3)
    widths, k = (40, 70), 130
    weight = torch.randn(sum(widths), k, generator=generator).to(device, dtype) * 0.1
    x = torch.randn(21, k, generator=generator).to(device, dtype)
    linears = (
        DeviceAdapterLinear(found.add_deltas, PlainLinear(weight, None), 4, Rows(), widths, device),
        AdapterLinear(PlainLinear(weight, None), 4, Rows(), widths, device),
    )
    for place, (rank, kind) in enumerate([(16, torch.bfloat16), (5, torch.float32), (40, torch.bfloat16)], start=1):
        own: list[Any] = []
        for width in widths:
            a, b = (torch.randn(*size, generator=generator) * 0.1 for size in ((rank, k), (width, rank)))
            own.append(Matrices(a.to(kind), b.to(kind), 0.5))
        if place == 2:
            own[1] = None
        for linear in linears:
            linear.put(place, linear.pack(own))
    batch = AdaptedBatch(torch.tensor([(5 * i + i * i) % 5 for i in range(21)], device=device))
    some = torch.tensor([0, 3, 4, 20], device=device)
    got, want = (linear(x, dataclasses.replace(batch)) for linear in linears)
    part, wanted = (linear(x[some], dataclasses.replace(batch), some) for linear in linears)
    return max(_compare("adapters", got, want), _compare("adapters of some rows", part, wanted))


def check_experts(found: Operators, dtype: torch.dtype, device: torch.device) -> float:
    """Few rows, for which a tile is the whole batch, and many, which are sorted by expert; weights that lie as they are
    multiplied, and transposed ones with gates and ups in turn, with biases and limits; and such weights in four bits.
    """
    worst = 0.0
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    count, width, hidden, choices = 5, 40, 72, 2
    joined, downs = random(count, 2 * width, hidden), random(count, hidden, width)
    crossed, biases, last = random(count, hidden, 2 * width), random(count, 2 * width), random(count, hidden)
    plain = Experts(joined[:, :width], joined[:, width:], downs, None, None, None, Gate())
    gates, ups = (crossed[..., half::2].transpose(1, 2) for half in (0, 1))
    downs = random(count, width, hidden).transpose(1, 2)
    turned = Experts(gates, ups, downs, biases[:, ::2], biases[:, 1::2], last, Gate(1.702, 0.5))
    coded = [_coded_experts(generator, dtype, kind, biases=kind == 0) for kind in range(3)]
    for experts in (plain, turned, *coded):
        here, there = _converted(experts, dtype, torch.device("cpu")), _converted(experts, dtype, device)
        for count_of_rows in (1, 19, 150):
            x = torch.randn(count_of_rows, experts.gate.shape[-1], generator=generator).to(dtype)
            # Nobody chooses the last.
            scores, index = torch.rand(count_of_rows, count - 1, generator=generator).topk(choices)
            want = TORCH.mix_experts(x, index, scores, here)
            moved = (each.to(device) for each in (x, index, scores))
            got = found.mix_experts(*moved, there).cpu()
            worst = max(worst, _compare("experts", got, want))
    return worst


def _coded_experts(generator: torch.Generator, dtype: torch.dtype, kind: int, *, biases: bool) -> Experts:
    """Random weights in one of the forms that there are; ``biases``: as gpt-oss's lie."""
    count, wide, deep = 5, 128, 256

    def coded(outputs: int, columns: int) -> Coded:
        form = (FLOAT4, whole4(torch.bfloat16), FLOAT8)[kind]
        shape = (count, outputs, columns // form.group)
        codes = torch.randint(256, (*shape[:2], shape[2] * form.size), dtype=torch.uint8, generator=generator)
        # Few digits, so that products are what they are: Triton's interpreter does not round to bfloat16 as devices do.
        scales = (torch.randint(8, 16, shape, generator=generator) / 1024).to(torch.bfloat16)
        if kind == 0:
            scales = torch.randint(119, 122, shape, dtype=torch.uint8, generator=generator)
        elif kind == 2:
            codes = codes % 128 % 88 + (codes & 128)  # up to 2 ** 4, and no NaN
            scales = scales.float()
        return Coded(codes, scales, form, dtype)

    def random(*shape: int) -> Tensor | None:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if biases else None

    joined, downs = coded(2 * wide, deep), coded(deep, wide)
    halves = [slice(0, None, 2), slice(1, None, 2)] if biases else [slice(wide), slice(wide, None)]
    bias = random(count, 2 * wide)
    first, second = (None if bias is None else bias[:, which] for which in halves)
    gate, up = map(joined.outputs, halves)
    return Experts(gate, up, downs, first, second, random(count, deep), Gate(1.702, 0.5) if biases else Gate())


def _converted(experts: Experts, dtype: torch.dtype, device: torch.device) -> Experts:
    """With the same strides; ``to`` makes views dense."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(experts):
        if isinstance(weight := getattr(experts, field.name), Coded):
            codes, scales = (_lying_alike(each, each.dtype, device) for each in (weight.codes, weight.scales))
            changed[field.name] = Coded(codes, scales, weight.form, dtype)
        elif isinstance(weight, Tensor):
            changed[field.name] = _lying_alike(weight, dtype, device)
    return dataclasses.replace(experts, **changed)


def _lying_alike(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    whole = torch.empty(size, dtype=dtype, device=device)
    return whole.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def check_drawing(found: Operators, device: torch.device) -> None:
    """The most likely tokens that hold 60 % of a distribution, and the one of them in the middle."""
    if found.draw_truncated is None:
        return
    probs = torch.softmax(torch.randn(2, 200, generator=torch.Generator().manual_seed(2)), -1)
    ordered = probs.sort(-1, descending=True).values
    least = ordered.gather(1, (ordered.cumsum(-1) < 0.6).sum(-1, keepdim=True))
    kept = torch.where(probs >= least, probs, 0.0).double()
    wanted = torch.searchsorted(kept.cumsum(-1), kept.sum(-1, keepdim=True) / 2, right=True)[:, 0]
    chosen = torch.zeros(2, dtype=torch.int64, device=device)
    columns = (torch.full((2, 1), v, device=device) for v in (200, 0.6, 0.0))
    points = torch.full((2, 1), 0.5, dtype=torch.float64, device=device)
    found.draw_truncated(probs.to(device), torch.zeros(2, dtype=torch.bool, device=device), chosen, *columns, points)
    if chosen.tolist() != wanted.tolist():
        raise RuntimeError(f"self-test: tokens {chosen.tolist()} were drawn instead of {wanted.tolist()}")


def check_rotation(found: Operators, dtype: torch.dtype, device: torch.device) -> float:
    worst = 0.0
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(50, 16, generator=generator) * 6
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    positions, slots = torch.tensor([0, 7, 49]).to(device), torch.tensor([33, 127, 40]).to(device)
    for dim, normed in ((32, True), (48, True), (48, False)):
        qkv = torch.randn(3, (6 + 2 * 2) * dim, generator=generator).to(device, dtype)
        gain = torch.rand(dim, generator=generator).to(device, dtype)
        norms = ((gain, 1e-6), (gain + 1, 1e-6)) if normed else (None, None)
        results = []
        for operators in (found, TORCH):
            cache = torch.zeros(2, 5, 2, 32, dim, dtype=dtype, device=device)
            results.append((operators.rotate_and_write(qkv, cache, cos, sin, positions, slots, *norms), cache))
        for got, want in zip(*results, strict=True):
            worst = max(worst, _compare("rotation", got, want))
        written = torch.zeros_like(cache)
        k, v = qkv.view(3, -1, dim)[:, 6:].chunk(2, 1)
        found.write_kv(written, k, v, slots)
        TORCH.write_kv(cache.zero_(), k, v, slots)
        worst = max(worst, _compare("K/V write", written, cache))
    return worst


def move(b: RandomBatch, device: torch.device) -> RandomBatch:
    """The same batch on ``device``."""
    moved = dataclasses.replace(b)
    for field in dataclasses.fields(b):
        if isinstance(value := getattr(b, field.name), Tensor):
            setattr(moved, field.name, value.to(device))
    return moved


def _compare(what: str, got: Tensor, want: Tensor) -> float:
    error = float(((got.float() - want.float()).abs() / want.float().abs().clamp_min(1)).max())
    if not error <= TOLERANCE[got.dtype]:  # a NaN fails, too
        raise RuntimeError(f"self-test: {what} in {got.dtype} differs by {error:.2e}")
    return error
