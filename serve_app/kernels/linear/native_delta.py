"""Linears with adapters in C++ (``cpu/adapters.cpp``): one call adds the deltas of all rows, whoever's they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.library import native
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.delta import AdapterLinear, LowRank, Rows
from serve_app.kernels.linear.packing import LinearLayout
from serve_app.kernels.linear.panels import plain_order
from serve_app.kernels.linear.places import Packed, Places


class NativeAdapterLinear(AdapterLinear):
    """``inner`` gives bfloat16 on a CPU. Raises ValueError for sizes that C++ does not take."""

    def __init__(
        self, library: native.Library, inner: Linear, places: int, rows: Rows, widths: Sequence[int], columns: int
    ) -> None:
        super().__init__(inner, places, rows, widths, torch.device("cpu"))
        if columns % 2:
            raise ValueError(f"{columns} columns do not go in pairs")
        self._library = library
        self._places = Places([LinearLayout(tuple(widths), columns, plain_order(sum(widths)))], places)

    def __call__(self, x: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        out = self.inner(x, batch, rows)
        if batch.adapters is None:
            return out
        which = batch.adapters if rows is None else batch.adapters[rows]
        if out.dtype is not torch.bfloat16 or x.shape[-1] != self._places.columns or len(x) < len(which):
            raise ValueError(f"a linear with adapters gets {list(x.shape)} and gives {out.dtype}")
        out = out.contiguous()
        records = self._places.records.ctypes.data
        native.adapt(self._library, records, self._places.places, self._places.lanes, which, x.contiguous(), out)
        return out

    def pack(self, own: Sequence[LowRank | None]) -> Packed | None:
        return self._places.prepare([own]) if any(delta is not None for delta in own) else None

    def put(self, place: int, delta: Packed | None) -> None:
        self._places.put(place, delta)
