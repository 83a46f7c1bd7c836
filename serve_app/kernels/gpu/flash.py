"""FlashAttention for prompts, through torch's ``varlen_attn``, with the signature of our own kernel.

Two ways to the same result, by what this torch has and what is activated in it (``torch.nn.attention``)::

    paged    FlashAttention 3 or 4: reads the block cache in place, through the block tables
    packed   FlashAttention 2, which is part of torch: the keys of the batch's requests are copied next to each other
             first, which costs about a hundredth of what attending to them does

Decode, verification of drafts, soft caps, sinks, float32 and float8 caches stay with the other kernel. Arguments are
found by name, since they came over time: ``is_causal`` in torch 2.10 only; ``scale`` and ``window_size`` from 2.11 on;
``enable_gqa``, ``seqused_k`` and ``block_table`` from 2.12 on.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.kernels.gpu.common import next_power_of_2

if TYPE_CHECKING:
    from serve_app.kernels.batch import AttentionBatch

log = logging.getLogger(__name__)

PAGE = tl.constexpr(32)  # tokens per KV block
ENVIRONMENT = "SERVE_APP_FLASH_ATTENTION"
# What torch can activate, the module that brings it, and the compute capabilities it is for.
PROVIDERS = {"FA3": ("flash_attn_interface", {9}), "FA4": ("flash_attn.cute", {9, 10})}
# Fewer queries per request leave its tiles mostly empty.
MIN_QUERIES = 64
# Keys per query of the batch that may be copied for it.
MAX_COPIED = 4

Attention = Callable[..., Tensor]


class Unavailable(RuntimeError):
    """Why this torch or this GPU has no FlashAttention for us."""


@dataclass(slots=True, frozen=True)
class FlashAttention:
    """Attention by ``varlen`` (torch's ``varlen_attn``, or what has its meaning), and by ``other`` for the rest."""

    varlen: Attention
    knows: frozenset[str]  # names of its parameters
    paged: bool
    other: Attention

    def __call__(
        self,
        q: Tensor,
        kv_layer: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """:func:`serve_app.kernels.attention.paged_attention`."""
        if window is not None and window >= batch.max_seq_len:
            window = None
        options = self.options(q, kv_layer, scale, window)
        if softcap or sinks is not None or options is None or not self.takes(q, kv_layer, batch):
            return self.other(q, kv_layer, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        lengths = batch.max_query_len, batch.max_seq_len
        if self.paged:
            keys, values = kv_layer[0].transpose(1, 2), kv_layer[1].transpose(1, 2)  # [blocks, 32, Hkv, D]
            return self.varlen(
                q, keys, values, batch.query_start, None, *lengths, seqused_k=batch.seq_lens,
                block_table=batch.block_tables, **options,
            )  # fmt: skip
        keys, values, start = copy_keys(kv_layer, batch)
        return self.varlen(q, keys, values, batch.query_start, start, *lengths, **options)

    def takes(self, q: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> bool:
        """Whether the batch is one of prompts, in numbers that ``varlen`` knows."""
        if q.dtype not in (torch.bfloat16, torch.float16) or kv_layer.dtype != q.dtype:
            return False
        if len(q) < MIN_QUERIES * len(batch.seq_lens):
            return False
        return self.paged or 0 < batch.total_seq_len <= MAX_COPIED * len(q)

    def options(self, q: Tensor, kv_layer: Tensor, scale: float, window: int | None) -> dict[str, Any] | None:
        """Keyword arguments beside those of the form; None if one is missing that the layer needs."""
        found: dict[str, Any] = {}
        if "window_size" in self.knows:
            # (n, 0) is a query's own key and n before it.
            found["window_size"] = (-1 if window is None else window - 1, 0)
        elif window is None and "is_causal" in self.knows:
            found["is_causal"] = True
        else:
            return None
        if "scale" in self.knows:
            found["scale"] = scale
        elif abs(scale * q.shape[2] ** 0.5 - 1) > 1e-6:
            return None
        if "enable_gqa" in self.knows and q.shape[1] != kv_layer.shape[2]:
            found["enable_gqa"] = True
        return found


def find(other: Attention, device: torch.device) -> tuple[FlashAttention, str]:
    """FlashAttention on ``device``, unchecked, and its name. Raises :class:`Unavailable`.

    What the environment variable SERVE_APP_FLASH_ATTENTION names is activated (``FA3``, ``FA4``; ``off`` means
    none at all); without it, what is installed for the GPU, if nothing is active yet.
    """
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted == "off":
        raise Unavailable(f"{ENVIRONMENT}=off")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no varlen_attn") from error
    function: Any = varlen_attn
    knows = frozenset(inspect.signature(function).parameters)
    active = activate(wanted, torch.cuda.get_device_capability(device)[0])
    paged = active is not None and {"block_table", "seqused_k"} <= knows
    return FlashAttention(function, knows, paged, other), f"{active or 'FA2'}, {'paged' if paged else 'packed'}"


def activate(wanted: str, major: int) -> str | None:
    """Activates an implementation in torch and returns the name of the active one; None is torch's own."""
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):
        if wanted:
            raise Unavailable(f"{ENVIRONMENT}={wanted}, but torch {torch.__version__} can't activate any")
        return None
    current = getattr(attention, "current_flash_attention_impl", lambda: None)
    if (active := current()) is not None and wanted in ("", active):
        return active
    for name, (module, majors) in PROVIDERS.items():
        if name == wanted or (not wanted and major in majors and installed(module)):
            try:
                attention.activate_flash_attention_impl(name)
                return name
            except Exception as error:  # a wheel for another torch, or for another GPU
                if wanted:
                    raise Unavailable(f"{name} can't be activated: {type(error).__name__}: {error}") from error
                log.warning("%s is installed (%s) but can't be activated: %s", name, module, error)
    if wanted:
        raise Unavailable(f"{ENVIRONMENT}={wanted} is unknown; use {', '.join(PROVIDERS)} or off")
    return None


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # the package around it is not there, or broken
        return False


def copy_keys(kv_layer: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [sum of ``seq_lens``, Hkv, D] of the batch's requests, one behind the other, and where each
    begins, int32 [R + 1].
    """
    kv_heads, dim = kv_layer.shape[2], kv_layer.shape[4]
    requests = len(batch.seq_lens)
    start = torch.zeros(requests + 1, dtype=torch.int32, device=kv_layer.device)
    torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=start[1:])
    copies = torch.empty((2, batch.total_seq_len, kv_heads, dim), dtype=kv_layer.dtype, device=kv_layer.device)
    _copy_keys[(requests, -(-batch.max_seq_len // 32), 2)](
        kv_layer, copies, batch.seq_lens, start, batch.block_tables,
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), copies.stride(0), batch.block_tables.stride(0),
        HEADS=kv_heads, DIM=dim, DIM_PADDED=next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return copies[0], copies[1], start


@triton.jit(do_not_specialize=["table_row", "copy_plane"])
def _copy_keys(
    kv, copies, seq_lens, start, tables, kv_plane, kv_block, kv_head, copy_plane, table_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """One block of one request, all heads; plane 0 holds keys, plane 1 values."""
    request = tl.program_id(0)
    page = tl.program_id(1)
    plane = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + request)
    if page * PAGE >= length:
        return
    block = tl.load(tables + request.to(tl.int64) * table_row + page).to(tl.int64)
    token = tl.arange(0, PAGE)
    column = tl.arange(0, DIM_PADDED)
    mask = (page * PAGE + token < length)[:, None] & (column < DIM)[None, :]
    row = (tl.load(start + request) + page * PAGE + token).to(tl.int64)
    for head in range(HEADS):
        source = kv + plane * kv_plane + block * kv_block + head * kv_head + (token * DIM)[:, None] + column[None, :]
        target = copies + plane * copy_plane + (row * HEADS + head)[:, None] * DIM + column[None, :]
        tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)
