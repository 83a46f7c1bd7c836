"""The operators between a layer's matrix products, as functions that a device runs in one launch each.

In plain torch here, for every device and as the truth for ``kernels/gpu/fused.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.linear.fp8 import quantize_rows
from serve_app.kernels.operators import Operators
from serve_app.kernels.reference.attention import paged_attention_torch, write_kv_torch
from serve_app.kernels.reference.experts import mix_experts


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + delta) * weight, x + delta)`` of [T, H] rows; without ``delta`` the second is ``x``."""
    total = x if delta is None else x + delta
    return F.rms_norm(total, (total.shape[-1],), weight.to(total.dtype), eps), total


def rotate_and_write(
    qkv: Tensor,
    kv_layer: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_norm: tuple[Tensor, float] | None,
    k_norm: tuple[Tensor, float] | None,
) -> Tensor:
    """Everything between the qkv projection and attention; returns the queries [T, Hq, D].

    ``qkv`` [T, (Hq + 2 Hkv) * D] holds query, key and value heads side by side; ``kv_layer`` [2, blocks, Hkv, 32, D];
    ``cos``, ``sin`` [positions, R / 2] float32, of which half-split rotation turns the first R columns of each head;
    ``positions``, ``slots`` [T] int64. ``q_norm`` and ``k_norm`` are an RMS norm's weight [D] and epsilon, both or
    none, applied per head before the rotation. Rotated keys and the values are written to ``slots``.
    """
    kv_heads, dim = kv_layer.shape[2], kv_layer.shape[4]
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = qkv.view(len(qkv), -1, dim).split([q_heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q = F.rms_norm(q, (dim,), q_norm[0].to(q.dtype), q_norm[1])
        k = F.rms_norm(k, (dim,), k_norm[0].to(k.dtype), k_norm[1])
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    write_kv_torch(kv_layer, rotate(k, c, s), v, slots)
    return rotate(q, c, s).contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of [T, heads, D] in the tables' precision; columns behind the rotated part stay."""
    half = cos.shape[-1]
    wide = x.to(cos.dtype)
    low, high, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [T, 2 I], gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


TORCH = Operators(
    "torch", add_rms_norm, rotate_and_write, swiglu, paged_attention_torch, write_kv_torch, quantize_rows, None, None,
    mix_experts,
)  # fmt: skip
