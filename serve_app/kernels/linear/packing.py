"""How an adapter's matrices come into the layout of ``cpu/delta.h``: planned once for all adapters of one form, then
done in one call of C++ (``cpu/packing.cpp``), which looks at every number on its way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_app.kernels.library.load import cpu_library
from serve_app.kernels.linear.delta import LowRank

# `Delta` of cpu/delta.h: a, b, scales, part_of; lanes, rank, bits, k; the first lane of up to four modules.
FIELDS = 12
PARTS = 4
GROUP = 16
LINE = 64
# `PackJob` of cpu/packing.cpp: from, to, rows, groups, count, columns, words, bits, scales, ranks, scale.
_JOB = 11
_FROM, _TO, _SCALES, _SCALE = 0, 1, 8, 10


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

    def sources(self) -> list[Source]:
        """Of each module."""
        starts, parts = np.cumsum([0, *self.widths]), self.part_of()
        found = []
        for part, start in enumerate(starts[:-1]):
            groups = np.flatnonzero(parts == part)
            rows = self.order.reshape(-1, GROUP)[groups].reshape(-1)
            rows = np.where(rows < 0, -1, rows - start)
            plain = np.array_equal(rows, np.arange(self.widths[part]))
            found.append(Source(groups, None if plain else rows))
        return found


@dataclass(slots=True)
class Source:
    """The groups of a matrix as it is packed, and its row in each of their lanes (-1: none); None for all rows in their
    own order.
    """

    groups: np.ndarray
    rows: np.ndarray | None

    @property
    def full(self) -> bool:
        return self.rows is None or bool((self.rows >= 0).all())


@lru_cache(4096)
def _lanes(start: int, rank: int) -> Source:
    """Of an A whose ranks are lanes from ``start`` on."""
    first, end = start // GROUP, -(-(start + rank) // GROUP)
    rows = np.arange(first * GROUP, end * GROUP) - start
    rows[rows >= rank] = -1
    return Source(np.arange(first, end), None if len(rows) == rank else np.maximum(rows, -1))


@dataclass(slots=True)
class Plan:
    """``starts``: the first lane of each module, -1 where it has no adapter; ``rank``: lanes of each that has."""

    starts: list[int]
    rank: int
    lanes: int
    bits: int

    @classmethod
    def of(cls, deltas: Sequence[LowRank | None]) -> Plan | None:
        there = [delta for delta in deltas if delta is not None]
        if not there:
            return None
        rank = max(-(-len(delta.a) // 2) * 2 for delta in there)  # ranks go in pairs
        starts, at = [], 0
        for delta in deltas:
            starts.append(-1 if delta is None else at)
            at += 0 if delta is None else rank
        half = all(matrix.dtype is torch.bfloat16 for delta in there for matrix in (delta.a, delta.b))
        return cls(starts, rank, -(-at // GROUP) * GROUP, 16 if half else 32)

    def sizes(self, columns: int, rows: int) -> tuple[int, int, int]:
        """Bytes of A, B and the scales."""
        return self.lanes * columns * self.bits // 8, rows * self.rank * self.bits // 8, 4 * self.lanes


@dataclass(slots=True)
class Recipe:
    """How adapters of one form are packed: ``records`` [linears, FIELDS] int64, whose addresses count from the
    beginning of the packed adapter, as the jobs' do; its bytes (``total``), those of its memory, and the most lanes.
    ``holes``: not all of that is written to. ``matrices`` are what the jobs read, or nothing where their addresses
    count from the beginning of a file.
    """

    records: np.ndarray
    total: int
    size: int
    lanes: int
    holes: bool
    jobs: np.ndarray
    matrices: list[Tensor]
    # Whose addresses the jobs have.
    sources: list[Source]

    @classmethod
    def of(
        cls,
        linears: Sequence[LinearLayout],
        sources: Sequence[Sequence[Source]],
        deltas: Sequence[Sequence[LowRank | None]],
    ) -> Recipe:
        """Of one adapter's ``deltas``, for each linear one per module, whose sizes are the linear's."""
        made = cls(np.zeros((len(linears), FIELDS), np.int64), 0, 0, 0, False, np.zeros((0, _JOB), np.int64), [], [])
        jobs: list[list[int]] = []
        for own, linear, outputs, record in zip(deltas, linears, sources, made.records, strict=True):
            if (plan := Plan.of(own)) is None:
                continue
            at = []
            for size in plan.sizes(linear.columns, len(linear.order)):
                at.append(made.size)
                made.size += -(-size // LINE) * LINE
                made.total += size
            record[:3] = at
            record[4:8] = plan.lanes, plan.rank, plan.bits, linear.columns
            record[8:] = plan.starts + [-1] * (PARTS - len(plan.starts))
            made.lanes = max(made.lanes, plan.lanes)
            filled = sum(len(delta.a) for delta in own if delta is not None)
            covered = GROUP * sum(len(source.groups) for source in outputs if source.full)
            made.holes |= filled < plan.lanes or None in own or covered < len(linear.order)
            for start, delta, source in zip(plan.starts, own, outputs, strict=True):
                if delta is not None:
                    jobs += made._jobs(plan, start, delta, source, at)
        made.jobs = np.array(jobs, np.int64).reshape(-1, _JOB)
        return made

    def _jobs(self, plan: Plan, start: int, delta: LowRank, source: Source, at: list[int]) -> list[list[int]]:
        ranks = len(delta.a)
        scale = int(np.float64(delta.scale).view(np.int64))
        a = self._job(plan, delta.a, _lanes(start, ranks), at[0], delta.a.shape[1])
        b = self._job(plan, delta.b, source, at[1], plan.rank)
        return [[*a, at[2] + 4 * start, ranks, scale], [*b, 0, 0, 0]]

    def _job(self, plan: Plan, matrix: Tensor, source: Source, to: int, wide: int) -> list[int]:
        matrix = matrix.detach().contiguous()
        if plan.bits == 32:
            matrix = matrix.float()
        self.matrices.append(matrix)
        self.sources.append(source)
        rows = 0 if source.rows is None else source.rows.ctypes.data
        count, columns = len(source.groups), matrix.shape[1]
        words = wide * plan.bits // 32
        return [matrix.data_ptr(), to, rows, source.groups.ctypes.data, count, columns, words, plan.bits]

    def within(self, data: bytes) -> Recipe | None:
        """The same for any file that has its matrices where ``data`` has them; None where they were not read from there
        as they are.
        """
        at = np.frombuffer(data, np.uint8).ctypes.data
        for matrix in self.matrices:
            if not at <= matrix.data_ptr() <= at + len(data) - matrix.nbytes:
                return None
        jobs = self.jobs.copy()
        jobs[:, _FROM] -= at
        return replace(self, jobs=jobs, matrices=[])

    def pack(self, to: int, data: bytes | None = None) -> bool:
        """Packs into memory at the address ``to``, of which what is not written to is to be zeros. ``data``: the file
        that addresses count from. False if a number is not finite.
        """
        jobs = self.jobs.copy()
        if data is not None:
            jobs[:, _FROM] += np.frombuffer(data, np.uint8).ctypes.data
        jobs[:, _TO] += to
        jobs[:, _SCALES] += to
        library = cpu_library()
        if library is not None:
            return library.pack_matrices(jobs.ctypes.data, len(jobs)) < 0
        return all([_pack(*job) for job in jobs.tolist()])


def _pack(
    at: int, to: int, rows_at: int, groups_at: int, count: int, columns: int, words: int, bits: int, scales: int,
    ranks: int, scale: int,
) -> bool:  # fmt: skip
    """What ``cpu/packing.cpp`` does, by numpy, which takes ten times as long."""
    kind = np.uint16 if bits == 16 else np.uint32
    groups = _at(groups_at, count, np.int64)
    rows = _at(rows_at, count * GROUP, np.int64) if rows_at else np.arange(count * GROUP)
    matrix = _at(at, (int(rows.max()) + 1) * columns, kind).reshape(-1, columns)
    lanes = np.zeros((count * GROUP, words * 32 // bits), kind)
    lanes[rows >= 0, :columns] = matrix[rows[rows >= 0]]
    packed = lanes.view(np.uint32).reshape(count, GROUP, words).transpose(0, 2, 1)
    place = _at(to, (int(groups.max()) + 1) * words * GROUP, np.uint32).reshape(-1, words, GROUP)
    place[groups] = np.where((rows >= 0).reshape(count, 1, GROUP), packed, place[groups])
    if ranks:
        _at(scales, ranks, np.float32)[:] = np.int64(scale).view(np.float64)
    infinite = kind(0x7F80 if bits == 16 else 0x7F800000)
    return not bool(((matrix & infinite) == infinite).any())


def _at(address: int, count: int, kind: Any) -> np.ndarray:
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), kind)
