"""Adapters in the layout of ``cpu/delta.h``: for each linear and each place a record that says where A and B lie.

An adapter's matrices lie in one piece of memory of its own, in the order in which a step reads them; putting it into a
place copies its records, 96 bytes a linear.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve_app.kernels.linear.delta import LowRank
from serve_app.kernels.linear.panels import PANEL, Arena

# `Delta` of cpu/delta.h: a, b, scales, part_of; lanes, rank, bits, k; the first lane of up to four modules.
FIELDS = 12
PARTS = 4
GROUP = 16


@dataclass(slots=True)
class LinearLayout:
    """A linear in panels: ``order`` is the source row of each packed row (-1: none), ``widths`` are its modules'
    outputs.
    """

    widths: tuple[int, ...]
    columns: int
    order: np.ndarray

    def part_of(self) -> np.ndarray:
        """[groups of 16 packed rows] int8: the module that a group belongs to, -1 for none. Raises ValueError where
        that differs within a group.
        """
        ends = np.cumsum(self.widths)
        parts = np.where(self.order < 0, -1, np.searchsorted(ends, self.order, side="right")).reshape(-1, GROUP)
        # The last group of a panel may be filled up with nothing.
        first = parts[:, 0]
        if len(self.widths) > PARTS or (np.where(parts < 0, first[:, None], parts) != first[:, None]).any():
            raise ValueError(f"modules of {list(self.widths)} outputs share groups of {GROUP}")
        return first.astype(np.int8)


@dataclass(slots=True)
class Packed:
    """An adapter's records [linears, FIELDS] int64, the memory that they point to, its size and the most lanes."""

    records: np.ndarray
    keep: list[object]
    bytes: int
    lanes: int


class Places:
    """What the C++ side reads: ``records`` [linears, places + 1, FIELDS]; those of place 0 stay empty."""

    def __init__(self, linears: Sequence[LinearLayout], places: int) -> None:
        self._linears = list(linears)
        self._parts = [linear.part_of() for linear in self._linears]
        self.records = np.zeros((len(self._linears), places + 1, FIELDS), np.int64)
        self.lanes = 0
        self._held: list[Packed | None] = [None] * (places + 1)

    @property
    def places(self) -> int:
        return self.records.shape[1] - 1

    def prepare(self, deltas: Sequence[Sequence[LowRank | None]]) -> Packed:
        """One adapter's ``deltas``, for each linear one per module, whose sizes are the linear's."""
        plans = [_plan(own) for own in deltas]
        sizes = [
            plan.bytes(linear.columns, len(linear.order)) if plan else 0
            for plan, linear in zip(plans, self._linears, strict=True)
        ]
        arena = Arena(sum(sizes) + 64 * 3 * len(sizes))
        records = np.zeros((len(self._linears), FIELDS), np.int64)
        for index, (plan, linear) in enumerate(zip(plans, self._linears, strict=True)):
            if plan is not None:
                records[index] = _pack(plan, deltas[index], linear, self._parts[index], arena)
        return Packed(records, [arena], sum(sizes), max((plan.lanes for plan in plans if plan), default=0))

    def put(self, place: int, packed: Packed | None) -> None:
        """None takes the adapter out."""
        self.records[:, place] = 0 if packed is None else packed.records
        self.lanes = max(self.lanes, 0 if packed is None else packed.lanes)
        self._held[place] = packed


@dataclass(slots=True)
class _Plan:
    """``starts``: the first lane of each module, -1 where it has no adapter; ``rank``: lanes of each that has."""

    starts: list[int]
    rank: int
    lanes: int
    bits: int

    def bytes(self, columns: int, rows: int) -> int:
        return (self.lanes * columns + rows * self.rank) * self.bits // 8 + 4 * self.lanes


def _plan(deltas: Sequence[LowRank | None]) -> _Plan | None:
    there = [delta for delta in deltas if delta is not None]
    if not there:
        return None
    rank = max(-(-len(delta.a) // 2) * 2 for delta in there)  # ranks go in pairs
    starts, at = [], 0
    for delta in deltas:
        starts.append(-1 if delta is None else at)
        at += 0 if delta is None else rank
    half = all(matrix.dtype is torch.bfloat16 for delta in there for matrix in (delta.a, delta.b))
    return _Plan(starts, rank, -(-at // GROUP) * GROUP, 16 if half else 32)


def _pack(
    plan: _Plan, deltas: Sequence[LowRank | None], linear: LinearLayout, part_of: np.ndarray, arena: Arena
) -> list[int]:
    lanes, columns, wide = plan.lanes, linear.columns, plan.bits == 32
    kind = np.uint32 if wide else np.uint16
    a = np.zeros((lanes, columns), kind)
    b = np.zeros((len(linear.order), plan.rank), kind)
    scales = np.zeros(lanes, np.float32)
    first = np.concatenate([[0], np.cumsum(linear.widths)])
    for part, delta in enumerate(deltas):
        if delta is None:
            continue
        start, rank = plan.starts[part], len(delta.a)
        a[start : start + rank] = _bits(delta.a, wide)
        own = np.flatnonzero((linear.order >= first[part]) & (linear.order < first[part + 1]))
        b[own, :rank] = _bits(delta.b, wide)[linear.order[own] - first[part]]
        scales[start : start + rank] = delta.scale
    # Neighbouring columns (of A) and ranks (of B) go in pairs where they have 16 bits.
    a_at, b_at = (
        _place(arena, matrix.view(np.uint32).reshape(-1, GROUP, matrix.shape[1] * plan.bits // 32)) for matrix in (a, b)
    )
    scales_at = arena.take(scales.nbytes)
    ctypes.memmove(scales_at, scales.ctypes.data, scales.nbytes)
    starts = plan.starts + [-1] * (PARTS - len(plan.starts))
    return [a_at, b_at, scales_at, part_of.ctypes.data, lanes, plan.rank, plan.bits, columns, *starts]


def _place(arena: Arena, words: np.ndarray) -> int:
    """Writes [groups, 16, n] as [groups, n, 16]; returns where."""
    at = arena.take(words.nbytes)
    target = np.ctypeslib.as_array((ctypes.c_uint32 * words.size).from_address(at))
    np.copyto(target.reshape(len(words), words.shape[2], GROUP), words.transpose(0, 2, 1))
    return at


def _bits(matrix: Tensor, wide: bool) -> np.ndarray:
    matrix = matrix.detach().contiguous()
    if wide:
        return matrix.float().numpy().view(np.uint32)
    return matrix.view(torch.int16).numpy().view(np.uint16)


assert PANEL % GROUP == 0
