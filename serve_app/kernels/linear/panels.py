"""bfloat16 linears on weights in panels (``cpu/gemm.h``; ``cpu/quantized.h`` for those in fewer bits), for CPUs with
bfloat16 dot products: one C++ call for a linear, and one for those of all experts of a mixture.

For up to some 32 rows this reads memory up to twice as fast as oneDNN, whose call alone costs as much as a small
linear. Sums run over the columns in one order whatever the number of rows.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_app.kernels.library import native
from serve_app.kernels.library.load import cpu_library
from serve_app.kernels.linear import compact
from serve_app.kernels.linear.quantize import PANEL, Quantized, pack_panels
from serve_app.kernels.shapes import ShapeMismatch

# `bits` of weights that are floats of four bits with scales (cpu/float4.h).
FLOAT4 = 5
# `Linear` of cpu/gemm.h: weight, bias, three addresses of exceptions; outputs, columns, bits.
LINEAR = "5P3q"
# Weights that stay in the last level of the cache are read fast as they are.
COMPACT_ABOVE_BYTES = 64 << 20
_LINEAR = struct.Struct(LINEAR)
_HUGE_PAGE = 2 << 20


def panel_library(*, quantized: bool = False) -> native.Library | None:
    """The C++ library if this CPU multiplies bfloat16 weights in panels, and with ``quantized`` also those in fewer
    bits.
    """
    library = cpu_library()
    known = torch.cpu._is_avx512_bf16_supported() and (not quantized or torch.cpu._is_vnni_supported())
    return library if library is not None and known else None


def plain_order(rows: int) -> np.ndarray:
    """Source row of each packed row for ``rows`` outputs in their own order; -1 pads the last panel."""
    order = np.arange(-(-rows // PANEL) * PANEL, dtype=np.int64)
    order[rows:] = -1
    return order


def panel_bytes(weight: Tensor) -> int:
    """Of a weight [..., n, k] in panels of bfloat16, rounded up to where the next one begins."""
    *experts, n, k = weight.shape
    each = -(-n // PANEL) * PANEL * k * 2
    return int(np.prod(experts, dtype=np.int64)) * (-(-each // 64) * 64)


class Arena:
    """Anonymous memory handed out front to back; huge pages save the address translation of a long read.

    What is not used costs nothing. Where ``size`` was too little, more of that size is taken.
    """

    def __init__(self, size: int) -> None:
        self._size, self._next, self._end = size, 0, 0
        self._maps: list[mmap.mmap] = []

    def take(self, size: int) -> int:
        """The address of ``size`` zeroed bytes, aligned to 64."""
        if self._next + size > self._end:
            self._map(max(size, self._size) + _HUGE_PAGE)
        at = self._next
        self._next += -(-size // 64) * 64
        return at

    def _map(self, size: int) -> None:
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._next, self._end = -(-base // _HUGE_PAGE) * _HUGE_PAGE, base + size


class PanelStore:
    """Packs weights one behind the other, in the order in which they come.

    ``size``: bytes that all of them will take at most (:func:`panel_bytes`). ``compact``: in 12 bits where that loses
    nothing, and in 4 where they came from that (MXFP4); by default where they do not fit the cache.
    """

    def __init__(self, library: native.Library, size: int, *, compact: bool | None = None) -> None:
        self.library = library
        self.compact = size > COMPACT_ABOVE_BYTES if compact is None else compact
        self.bytes = 0  # what a pass over all weights reads
        self._arena = Arena(size)
        self._keep: list[Any] = []

    def take(self, size: int) -> int:
        """The address of ``size`` bytes."""
        self.bytes += size
        return self._arena.take(size)

    def hold(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor that lives as long as the store."""
        self._keep.append(tensor)
        return tensor.data_ptr()

    def pack(self, source: Tensor | Quantized, order: np.ndarray, bias: Tensor | None = None) -> tuple[int, ...]:
        """The record ``Linear`` of a weight [n, k], bfloat16 or in fewer bits, and its bias [n], packed row r being row
        ``order[r]`` (-1: zeros)."""
        rows, k = source.shape
        if isinstance(source, Quantized):
            at = self.take(len(order) * source.row_bytes)
            panels = pack_panels(source, order)
            ctypes.memmove(at, panels.data_ptr(), panels.numel())
            return at, self.bias(order, bias), 0, 0, 0, rows, k, source.bits
        source = source.detach().contiguous()
        threads = native.threads(self.library)
        if self.compact and k % 32 == 0 and self.library.fits_float4(source.data_ptr(), rows, k, threads):
            at, bits, exceptions = self.take(len(order) * k * 17 // 32), FLOAT4, (0, 0, 0)
            self.library.pack_float4(source.data_ptr(), at, order.ctypes.data, len(order), k, threads)
            return at, self.bias(order, bias), *exceptions, rows, k, bits
        extra = compact.survey(self.library, source, order, threads) if self.compact else None
        if extra is not None:
            at, bits = self.take(compact.compact_bytes(len(order), k)), 12
            compact.pack(self.library, source, order, threads, extra, at)
            self._keep.append(extra)
            self.bytes += extra.nbytes
            exceptions = extra.addresses()
        else:
            at, bits, exceptions = self.take(len(order) * k * 2), 16, (0, 0, 0)
            self.library.pack(source.data_ptr(), at, order.ctypes.data, len(order), k, threads)
        return at, self.bias(order, bias), *exceptions, rows, k, bits

    def bias(self, order: np.ndarray, bias: Tensor | None) -> int:
        """The address of a bias as float32 in the order of the packed rows; 0 for none."""
        if bias is None:
            return 0
        values = torch.cat([bias.detach().float(), torch.zeros(1)])
        return self.hold(values[torch.from_numpy(order)].contiguous())  # -1 is the zero at the end


class PanelLinears:
    """Linears of one shape: ``weights`` [n, k], all bfloat16 or all in as many bits, and their biases [n] or None."""

    def __init__(
        self, store: PanelStore, weights: Sequence[Tensor | Quantized], biases: Sequence[Tensor | None]
    ) -> None:
        self.out_features, self.in_features = weights[0].shape
        if len({each.bits if isinstance(each, Quantized) else 16 for each in weights}) > 1:
            raise ShapeMismatch("experts differ in their bits")
        if self.in_features % 2 or any(weight.shape != weights[0].shape for weight in weights):
            raise ShapeMismatch(f"weights of {list(weights[0].shape)} do not fit panels; leave them to oneDNN")
        order = plain_order(self.out_features)
        packed = [store.pack(w, order, b) for w, b in zip(weights, biases, strict=True)]
        self.store = store  # whose memory the records point to
        self._records = ctypes.create_string_buffer(b"".join(_LINEAR.pack(*record) for record in packed))
        self._at, self._count, self._library = ctypes.addressof(self._records), len(packed), store.library

    def __call__(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """``x`` [..., k] bfloat16 by the only linear: [..., n]; with ``chosen`` [P] int64, the linear of each pair, P a
        multiple of the rows of ``x`` [T, k]: [P, n], pair p being row p // (P / T). Raises ValueError for sizes that do
        not fit and linears that there are not.
        """
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self.in_features:
            raise ShapeMismatch(
                f"a linear of {self.in_features} columns in bfloat16 gets {list(x.shape)} of {x.dtype}; config.json "
                "contradicts the weights"
            )
        return native.linear(self._library, self._at, self._count, x, self.out_features, chosen)

    def weight(self) -> Tensor:
        """The only linear's weight [n, k], by multiplying the unit matrix (not for the hot path)."""
        at, _, *rest = _LINEAR.unpack(self._records.raw[: _LINEAR.size])
        plain = ctypes.create_string_buffer(_LINEAR.pack(at, 0, *rest))  # without the bias
        unit = torch.eye(self.in_features, dtype=torch.bfloat16)
        found = native.linear(self._library, ctypes.addressof(plain), 1, unit, self.out_features, None)
        return found.t().contiguous()
