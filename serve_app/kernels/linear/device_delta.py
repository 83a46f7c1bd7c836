"""Linears with adapters on a device where one launch serves all rows, whatever their adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.delta import AdapterLinear, LowRank, Rows
from serve_app.kernels.linear.tiles import tiles_of

# What adds deltas (`serve_app.kernels.gpu.adapters`), and the sizes of its tables.
AddDeltas = Callable[[Tensor, Tensor, Any, Tensor, Tensor, Tensor], None]
OUTPUTS, FIELDS, PARTS, MOST_LANES = 64, 5, 4, 1024


@dataclass(slots=True)
class DeviceDelta:
    """One adapter's delta at one linear: ``a`` [lanes, k] and ``b`` [n, rank], of one dtype; ``starts``: the first lane
    of each module, -1 for none, and ``scales`` of each.
    """

    a: Tensor
    b: Tensor
    starts: list[int]
    scales: list[float]

    @property
    def bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class DeviceAdapterLinear(AdapterLinear):
    """``inner`` and its adapters, named by a table on the device."""

    def __init__(
        self, add: AddDeltas, inner: Linear, places: int, rows: Rows, widths: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(inner, places, rows, widths, device)
        if len(widths) > PARTS:
            raise ValueError(f"{len(widths)} modules side by side")
        self._add, self._count = add, places
        self._held: list[DeviceDelta | None] = [None] * (places + 1)
        self._table = torch.zeros((places + 1, FIELDS + PARTS), dtype=torch.int64, device=device)
        self._scales = torch.zeros((places + 1, PARTS), dtype=torch.float32, device=device)
        blocks, at = [], 0
        for part, width in enumerate(widths):
            blocks += [(part, first, at + width) for first in range(at, at + width, OUTPUTS)]
            at += width
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        out = self.inner(x, batch, rows)
        if batch.adapters is None:
            return out
        out = out.contiguous()
        tiles = tiles_of(batch, rows, self._count)
        self._add(out, x.contiguous(), tiles, self._table, self._scales, self._blocks)
        return out

    def pack(self, own: Sequence[LowRank | None]) -> DeviceDelta | None:
        there = [delta for delta in own if delta is not None]
        if not there:
            return None
        rank = max(len(delta.a) for delta in there)
        if rank * len(there) > MOST_LANES:
            raise ValueError(f"{len(there)} modules of rank {rank}; {MOST_LANES} ranks of one linear are the most")
        half = all(m.dtype is torch.bfloat16 for delta in there for m in (delta.a, delta.b))
        dtype = torch.bfloat16 if half else torch.float32
        a = torch.zeros((rank * len(there), there[0].a.shape[1]), dtype=dtype)
        b = torch.zeros((sum(self._widths), rank), dtype=dtype)
        starts, scales, lane, at = [-1] * PARTS, [0.0] * PARTS, 0, 0
        for part, (delta, width) in enumerate(zip(own, self._widths, strict=True)):
            if delta is not None:
                a[lane : lane + len(delta.a)] = delta.a.to(dtype)
                b[at : at + width, : len(delta.a)] = delta.b.to(dtype)
                starts[part], scales[part] = lane, delta.scale
                lane += rank
            at += width
        return DeviceDelta(a.to(self._device), b.to(self._device), starts, scales)

    def put(self, place: int, delta: DeviceDelta | None) -> None:
        row, scales = [0] * FIELDS + [-1] * PARTS, [0.0] * PARTS
        if delta is not None:
            wide = delta.a.dtype is torch.float32
            row = [delta.a.data_ptr(), delta.b.data_ptr(), len(delta.a), delta.b.shape[1], int(wide), *delta.starts]
            scales = delta.scales
        # Ordered behind the steps before: these may still read what was there.
        self._table[place].copy_(torch.tensor(row))
        self._scales[place].copy_(torch.tensor(scales))
        self._held[place] = delta
