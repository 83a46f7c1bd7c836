"""Which attention a model's prompts get on a GPU: our Triton kernel, or FlashAttention where that is there, right and
faster. Decided once at load, on the model's own head sizes."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from serve_app.kernels.gpu.selftest import TOLERANCE, move
from serve_app.kernels.library.selftest import RandomBatch, random_batch
from serve_app.kernels.operators import Operators
from serve_app.kernels.reference.operators import TORCH

log = logging.getLogger(__name__)

Attention = Callable[..., Tensor]
# Seconds that one call takes on the device.
Clock = Callable[[Callable[[], object]], float]
ROUNDS = 7
# New tokens and cached ones of each request, and the window.
Case = tuple[list[int], list[int], int | None]
CASES: list[Case] = [
    ([130, 70], [0, 0], None),
    ([150, 90], [45, 200], None),
    ([200], [31], 50),
    ([1, 1, 1], [700, 0, 33], None),
    ([3, 1], [900, 40], None),
]
# One of each kind of launch beside those, so that no request has to wait for a compiler.
LAUNCHES: list[Case] = [
    ([300], [1500], None),
    ([9, 4], [900, 20], None),
    ([9], [0], None),
    ([3], [0], None),
    ([1], [0], None),
]
# Less is noise, and the kernel that decode uses anyway is one kernel less to depend on.
MIN_GAIN = 1.03


@dataclass(slots=True, frozen=True)
class Heads:
    """What attention is about in one model."""

    q_heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    cache: torch.dtype  # of keys and values


@torch.inference_mode()
def choose_attention(operators: Operators, heads: Heads, device: torch.device) -> tuple[Attention, str]:
    """The attention for a model and why it was chosen. Only on CUDA devices with Triton operators is there a choice."""
    if device.type != "cuda" or operators.name == "torch":
        return operators.attention, ""
    try:
        check(operators.attention, heads, device, CASES + LAUNCHES)
    except Exception as failure:  # no room for its tiles, say
        log.warning("plain torch attends, many times slower: Triton with %s: %s", heads, failure)
        return TORCH.attention, f"attention by torch (Triton: {type(failure).__name__}: {str(failure)[:200]})"
    from serve_app.kernels.gpu import flash

    try:
        candidate, name = flash.find(operators.attention, device)
    except flash.Unavailable as reason:
        return operators.attention, f"prompts by Triton ({reason})"
    return compare(operators.attention, candidate, name, heads, device, device_seconds)


def compare(
    ours: Attention, candidate: Attention, name: str, heads: Heads, device: torch.device, clock: Clock
) -> tuple[Attention, str]:
    """``candidate`` if it gives what torch gives and is faster than ``ours`` on prompts, else ``ours``."""
    if heads.dtype not in (torch.bfloat16, torch.float16) or heads.cache != heads.dtype:
        return ours, f"prompts by Triton (FlashAttention does not know {heads.dtype} with a cache of {heads.cache})"
    try:
        error = check(candidate, heads, device)
    except Exception as failure:  # whatever is wrong with it, ours is there
        log.warning("FlashAttention (%s) is not used: %s: %s", name, type(failure).__name__, failure)
        return ours, f"prompts by Triton (FlashAttention, {name}: {type(failure).__name__}: {str(failure)[:200]})"
    batch = move(prompts(heads), device)
    times: dict[str, list[float]] = {"ours": [], "candidate": []}
    for number in range(ROUNDS + 1):
        for key, attention in (("ours", ours), ("candidate", candidate)):
            taken = clock(partial(attention, batch.q, batch.kv_layer, batch, scale=heads.dim**-0.5))
            if number:  # the first round compiles
                times[key].append(taken)
    gain = statistics.median(times["ours"]) / statistics.median(times["candidate"])
    if gain < MIN_GAIN:
        return ours, f"prompts by Triton (FlashAttention, {name}, is {gain:.2f} times as fast)"
    return candidate, f"prompts by FlashAttention ({name}, {gain:.2f} times as fast as Triton, error {error:.1e})"


def check(candidate: Attention, heads: Heads, device: torch.device, cases: list[Case] = CASES) -> float:
    """Largest error against torch on prompts without and behind a cached prefix, with a window, and on decode. Raises
    RuntimeError when it is too large.
    """
    worst = 0.0
    for seed, (queries, contexts, window) in enumerate(cases):
        batch = random_batch(queries, contexts, heads.q_heads, heads.kv_heads, heads.dim, heads.dtype, seed)
        b = move(batch, device)
        options = {"scale": heads.dim**-0.5, "window": window}
        got = candidate(b.q, b.kv_layer.to(heads.cache), b, **options).float()
        # Products of float32 may be set to be less exact on the device.
        truth = batch if heads.dtype == torch.float32 else b
        want = TORCH.attention(truth.q, truth.kv_layer.to(heads.cache), truth, **options).to(device).float()
        error = float(((got - want).abs() / want.abs().clamp_min(1)).max())
        if not error <= TOLERANCE[heads.dtype]:  # a NaN fails, too
            raise RuntimeError(f"it differs from torch by {error:.2e} on {queries} queries behind {contexts} keys")
        worst = max(worst, error)
    return worst


def prompts(heads: Heads) -> RandomBatch:
    """What is timed: four prompts of a thousand tokens, nothing cached."""
    return random_batch([1024] * 4, [0] * 4, heads.q_heads, heads.kv_heads, heads.dim, heads.dtype, 0)


def device_seconds(run: Callable[[], object]) -> float:
    """By CUDA events around one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
