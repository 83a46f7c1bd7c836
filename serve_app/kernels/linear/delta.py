"""Linears whose rows each add the delta of an adapter: ``base(x) + scale * (x @ A.T) @ B.T``.

Rounded as PEFT rounds: the base's result to the weight's dtype, then A, B and the rows in float32, then the sum once.
Rows without an adapter get the base's result, and a batch in which no row has one takes the base's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.linear.base import Linear


class LowRank(Protocol):
    """``scale * (x @ a.T) @ b.T``: ``a`` [r, k], ``b`` [n, r]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(slots=True)
class PlaceDelta:
    """One adapter's delta at one linear: ``a`` [sum of r, k], and of each part that has one its first rank, its first
    output and ``b`` [n, r], scaled; all float32.
    """

    a: Tensor
    parts: list[tuple[int, int, Tensor]]

    @property
    def bytes(self) -> int:
        return self.a.nbytes + sum(b.nbytes for _, _, b in self.parts)


class Rows:
    """Rows of a batch by their adapter, worked out once for all linears of a step."""

    def __init__(self) -> None:
        self._of: tuple[Tensor | None, Tensor | None] = (None, None)
        self._groups: list[tuple[int, Tensor]] = []

    def groups(self, adapters: Tensor, rows: Tensor | None) -> list[tuple[int, Tensor]]:
        """(place, its rows) for every adapter of ``adapters`` [T], or of those of its rows that ``rows`` names."""
        if self._of[0] is not adapters or self._of[1] is not rows:
            which = (adapters if rows is None else adapters[rows]).cpu().numpy()
            order = np.argsort(which, kind="stable")
            places, starts = np.unique(which[order], return_index=True)
            parts = np.split(order, starts[1:])
            self._groups = [
                (int(place), torch.from_numpy(part).to(adapters.device))
                for place, part in zip(places, parts, strict=False)  # of no rows there is one part, and no place
                if place
            ]
            self._of = (adapters, rows)
        return self._groups


def pack(deltas: Sequence[LowRank | None], widths: Sequence[int], device: torch.device) -> PlaceDelta | None:
    """The delta of modules whose outputs of ``widths`` stand side by side; None where none of them has one."""
    downs, parts, rank, at = [], [], 0, 0
    for delta, width in zip(deltas, widths, strict=True):
        if delta is not None:
            downs.append(delta.a.to(device, torch.float32))
            parts.append((rank, at, (delta.b.to(device, torch.float32) * delta.scale).contiguous()))
            rank += len(delta.a)
        at += width
    return PlaceDelta(torch.cat(downs), parts) if downs else None


class AdapterLinear(Linear):
    """``inner`` and the deltas of up to ``places`` adapters; place 0 stands for none."""

    def __init__(self, inner: Linear, places: int, rows: Rows, widths: Sequence[int], device: torch.device) -> None:
        self.inner, self._rows, self._widths, self._device = inner, rows, widths, device
        self.deltas: list[PlaceDelta | None] = [None] * (places + 1)

    def __call__(self, x: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        out = self.inner(x, batch, rows)
        return out if batch.adapters is None else self.add(out, x, self._rows.groups(batch.adapters, rows))

    def pack(self, own: Sequence[LowRank | None]) -> Any:
        """One adapter's deltas of this linear's modules, with ``bytes``; None where it has none."""
        return pack(own, self._widths, self._device)

    def put(self, place: int, delta: Any) -> None:
        """What :meth:`pack` gave, None to take it out."""
        self.deltas[place] = delta

    def idle(self, batch: Any) -> bool:
        return batch.adapters is None and self.inner.idle(batch)

    def add(self, out: Tensor, x: Tensor, groups: list[tuple[int, Tensor]]) -> Tensor:
        """``out`` [N, n], changed in place, of ``x`` [N, k] with the deltas of its rows."""
        for place, own in groups:
            if (delta := self.deltas[place]) is None:
                continue
            inner = F.linear(x[own].float(), delta.a)
            for first, at, b in delta.parts:
                columns = slice(at, at + len(b))
                added = F.linear(inner[:, first : first + b.shape[1]], b)
                out[own, columns] = (out[own, columns].float() + added).to(out.dtype)
        return out

    def swish(self, x: Tensor, batch: Any) -> Tensor:
        return self.inner.swish(x, batch) if batch.adapters is None else super().swish(x, batch)

    def times(self, x: Tensor, other: Tensor, batch: Any) -> Tensor:
        return self.inner.times(x, other, batch) if batch.adapters is None else super().times(x, other, batch)

    def plus(self, x: Tensor, other: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        if batch.adapters is None:
            return self.inner.plus(x, other, batch, rows)
        return super().plus(x, other, batch, rows)
