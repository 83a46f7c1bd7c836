"""ctypes access to the compiled kernels: one packed argument record per call, no per-argument conversions.

The records mirror the ``Args`` structs of ``cpu/*.cpp`` field by field (8 bytes each, native order).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_ATTENTION = struct.Struct("7P12q2dq")
_WRITE = struct.Struct("4P8q")
_NORM = struct.Struct("3P6qd")
_LINEAR = struct.Struct("4P4q")
_ADAPT = struct.Struct("4P6q")
_MASK = struct.Struct("3P4q")
_TYPES = (torch.float32, torch.bfloat16)
_REASONS = {
    2: "query_start, seq_lens and block_tables contradict each other",
    3: "a block id or slot is outside the cache",
}
_LINEAR_REASONS = {
    3: "an expert that there is not",
    6: "a place for adapters that there is not",
    9: "this build has no bfloat16 or 8-bit dot products",
}
MAX_HEAD_DIM = 640


@dataclass(slots=True, frozen=True)
class Library:
    """The loaded functions, and how many threads they may use (0 = as many as torch)."""

    path: Path
    attention: Callable[[bytes], int]
    write: Callable[[bytes], int]
    norm: Callable[[bytes], int]
    decoder: Callable[[bytes], int]
    linear: Callable[[bytes], int]
    adapt: Callable[[bytes], int]
    mask: Callable[[bytes], int]
    pack: Callable[..., None]
    survey_compact: Callable[..., None]
    pack_compact: Callable[..., None]
    pack_matrices: Callable[..., int]
    fits_float4: Callable[..., int]
    pack_float4: Callable[..., None]
    add_up: Callable[..., int]
    thread_limit: int
    note: str


def open_library(path: Path) -> Library:
    """Loads the library. Raises OSError when it cannot be loaded, AttributeError when it is not ours."""
    handle = ctypes.CDLL(str(path))  # CDLL releases the GIL during calls
    functions = (
        handle.paged_attention, handle.write_kv, handle.rms_norm, handle.decoder_step, handle.linear,
        handle.adapt_linear, handle.mask_logits,
    )  # fmt: skip
    for function in functions:
        function.argtypes, function.restype = (ctypes.c_char_p,), ctypes.c_int
    pack = handle.pack_panels
    pack.argtypes, pack.restype = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 3), None
    survey, compact = handle.survey_compact, handle.pack_compact
    sizes = (ctypes.c_int64,) * 3
    survey.argtypes, survey.restype = (*(ctypes.c_void_p,) * 2, *sizes, *(ctypes.c_void_p,) * 2), None
    compact.argtypes, compact.restype = (*(ctypes.c_void_p,) * 2, *sizes, *(ctypes.c_void_p,) * 5), None
    matrices = handle.pack_matrices
    matrices.argtypes, matrices.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    fits, float4 = handle.fits_float4, handle.pack_float4
    fits.argtypes, fits.restype = (ctypes.c_void_p, *sizes), ctypes.c_int
    float4.argtypes, float4.restype = pack.argtypes, None
    add_up = handle.add_up
    add_up.argtypes, add_up.restype = (ctypes.c_void_p,), ctypes.c_int
    limit, note = 0, "threads follow torch.get_num_threads()"
    if (runtimes := len(openmp_runtimes())) > 1:
        # Two pools would spin against each other on the same cores; torch's does most of the work, so it
        # keeps them.
        limit, note = 1, f"single-threaded: {runtimes} OpenMP runtimes are loaded"
    return Library(path, *functions, pack, survey, compact, matrices, fits, float4, add_up, limit, note)


def threads(lib: Library) -> int:
    """How many threads a call may use."""
    return lib.thread_limit or torch.get_num_threads()


def openmp_runtimes() -> set[str]:
    """Files of the OpenMP runtimes mapped into this process (empty where /proc is missing)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split()[-1] for line in lines if "/" in line}
    return {os.path.realpath(p) for p in paths if os.path.basename(p).startswith(("libgomp", "libomp", "libiomp"))}


def attention_supports(q: Tensor, kv_layer: Tensor) -> bool:
    """Whether :func:`attention` takes these tensors: CPU, float32 or bfloat16, head_dim a multiple of 16."""
    return (
        q.dtype in _TYPES
        and q.dtype == kv_layer.dtype
        and not q.is_cuda
        and q.shape[2] % 16 == 0
        and q.shape[2] <= MAX_HEAD_DIM
        and q.stride(2) == 1
        and kv_layer.is_contiguous()
    )


def attention(
    lib: Library,
    q: Tensor,
    kv_layer: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Paged attention in C++; shapes as in ``attention.paged_attention``. Raises ValueError for contradictory
    input."""
    tokens, q_heads, dim = q.shape
    token_stride, head_stride, _ = q.stride()
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype)
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    _, num_blocks, kv_heads, _, _ = kv_layer.shape
    requests = seq_lens.shape[0]
    code = lib.attention(
        _ATTENTION.pack(
            q.data_ptr(), kv_layer.data_ptr(), out.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
            block_tables.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
            token_stride, head_stride, requests, tokens, q_heads, kv_heads, dim, num_blocks,
            block_tables.stride(0), window or 0, q.dtype is torch.bfloat16,
            threads(lib), scale, softcap or 0.0, len(kv_layer) == 1,
        )
    )  # fmt: skip
    if code:
        raise ValueError(f"paged attention refused the batch: {_REASONS[code]}")
    return out


def write_supports(kv_layer: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether :func:`write_kv` takes these tensors: CPU, one dtype, contiguous cache, unit stride along
    head_dim."""
    return (
        not k.is_cuda
        and k.dtype == kv_layer.dtype
        and v.dtype == kv_layer.dtype
        and k.stride(2) == 1
        and v.stride(2) == 1
        and kv_layer.is_contiguous()
    )


def write_kv(lib: Library, kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Copies the rows of ``k`` and ``v`` to their slots. Raises ValueError for a slot outside the cache."""
    size = k.element_size()
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    tokens, kv_heads, dim = k.shape
    code = lib.write(
        _WRITE.pack(
            kv_layer.data_ptr(), k.data_ptr(), v.data_ptr(), slots.data_ptr(),
            k_token * size, k_head * size, v_token * size, v_head * size, tokens, kv_heads, dim * size,
            kv_layer.shape[1],
        )
    )  # fmt: skip
    if code:
        raise ValueError(f"K/V write refused: {_REASONS[code]}")


def rms_norm(lib: Library, x: Tensor, weight: Tensor, eps: float, round_first: bool) -> Tensor:
    """RMS norm over the last dimension (a multiple of 16) of a contiguous CPU tensor; ``weight`` is float32
    [dim]."""
    out = torch.empty_like(x)
    dim = x.shape[-1]
    if weight.shape[0] != dim:
        raise ValueError(
            f"a norm of {weight.shape[0]} on rows of {dim}; the model's config.json contradicts its weights"
        )
    lib.norm(
        _NORM.pack(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, dim,
            threads(lib), x.dtype is torch.bfloat16, round_first, eps,
        )
    )  # fmt: skip
    return out


def linear(lib: Library, linears: int, count: int, x: Tensor, n: int, chosen: Tensor | None) -> Tensor:
    """``x`` [..., k] bfloat16 by one of ``count`` linears at the address ``linears``, all [n, k]; see
    :class:`serve_app.kernels.linear.panels.PanelLinears`, which knows that they are. Raises ValueError.
    """
    x = x.contiguous()
    rows = x.numel() // x.shape[-1]
    if chosen is None:
        pairs, which = rows, 0
        out = torch.empty((*x.shape[:-1], n), dtype=torch.bfloat16)
    else:
        chosen = chosen.contiguous()
        pairs, which = chosen.numel(), chosen.data_ptr()
        if chosen.dtype is not torch.int64 or pairs % max(rows, 1) or (pairs and not rows):
            raise ValueError(f"{pairs} choices of {chosen.dtype} for {rows} rows; give int64, as many for each row")
        out = torch.empty((pairs, n), dtype=torch.bfloat16)
    code = lib.linear(_LINEAR.pack(linears, x.data_ptr(), out.data_ptr(), which, count, rows, pairs, threads(lib)))
    if code:
        raise ValueError(f"the linear refused its input: {_LINEAR_REASONS[code]}")
    return out


def adapt(lib: Library, deltas: int, places: int, lanes: int, adapters: Tensor, x: Tensor, out: Tensor) -> None:
    """Adds to ``out`` [T, n] the deltas of ``x`` [T, k], both contiguous bfloat16, by the adapters of the first rows
    ``adapters`` [up to T] int64: places of the records at the address ``deltas``, whose sizes are those of ``x`` and
    ``out``; see :class:`serve_app.kernels.linear.places.Places`. Raises ValueError.
    """
    code = lib.adapt(
        _ADAPT.pack(
            deltas, adapters.data_ptr(), x.data_ptr(), out.data_ptr(), len(adapters), x.shape[1], out.shape[1], places,
            lanes, threads(lib),
        )
    )  # fmt: skip
    if code:
        raise ValueError(f"the linear refused its input: {_LINEAR_REASONS[code]}")


def mask_logits(lib: Library, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Makes ``logits`` [S, V] float32, contiguous, minus infinity in ``rows`` [C] int64 where ``bits`` [C, words]
    int32, contiguous, are zero, lowest token first. The rows are the caller's to check. Raises ValueError.
    """
    count, words = bits.shape
    code = lib.mask(
        _MASK.pack(
            logits.data_ptr(), rows.data_ptr(), bits.data_ptr(), count, logits.shape[1], words, threads(lib),
        )
    )  # fmt: skip
    if code:
        raise ValueError(f"a mask of {32 * words} tokens for {logits.shape[1]} logits")
