"""Adapters in the layout of ``cpu/delta.h``: for each linear and each place a record that says where A and B lie.

An adapter's matrices lie in one piece of memory of its own, in the order in which a step reads them; putting it into a
place copies its records, 96 bytes a linear. Records count from the beginning of that memory until then, so that both
can be written to a file and read again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import RawIOBase

import numpy as np
import torch
from torch import Tensor

from serve_app.kernels.library.load import cpu_library
from serve_app.kernels.linear.delta import LowRank
from serve_app.kernels.linear.panels import PANEL, Arena

# `Delta` of cpu/delta.h: a, b, scales, part_of; lanes, rank, bits, k; the first lane of up to four modules.
FIELDS = 12
PARTS = 4
GROUP = 16
_LINE = 64
# What is read from memory of its own, in huge pages, and does not waste most of one; and how many of those that are
# gone are kept for others.
_LARGE = 1 << 20
_SPARES = 2
# Of a file: what it is, its linears, the most lanes, the adapter's bytes and those of its memory.
_HEAD = struct.Struct("<8s4q")
_KIND = b"places-1"


class NotPacked(ValueError):
    """A file that is no adapter packed for this model."""


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

    def sources(self) -> list[_Source]:
        """Of each module."""
        starts, parts = np.cumsum([0, *self.widths]), self.part_of()
        found = []
        for part, start in enumerate(starts[:-1]):
            groups = np.flatnonzero(parts == part)
            rows = self.order.reshape(-1, GROUP)[groups].reshape(-1)
            rows = np.where(rows < 0, -1, rows - start)
            found.append(_Source(groups, rows, np.array_equal(rows, np.arange(self.widths[part]))))
        return found


@dataclass(slots=True)
class _Source:
    """The groups of outputs that belong to a module, the module's output in each of their lanes (-1: none), and whether
    those are all of its outputs in their own order.
    """

    groups: np.ndarray
    rows: np.ndarray
    plain: bool


@dataclass(slots=True, eq=False)
class Spare:
    """Memory of an adapter that is gone."""

    arena: Arena
    at: int
    size: int


def _taken(spares: list[Spare] | None, size: int) -> Spare | None:
    """One that is large enough and not much larger; any thread may take it at the same moment."""
    for spare in list(spares or ()):
        if size <= spare.size <= size * 5 // 4:
            try:
                spares.remove(spare)  # type: ignore[union-attr]
            except ValueError:
                continue
            return spare
    return None


class Memory:
    """``size`` bytes, zeroed unless they need not be. Large ones come from ``spare``, if there are such, and go back
    there: for new pages the kernel takes as long as packing does.
    """

    def __init__(self, size: int, spare: list[Spare] | None = None, *, zeroed: bool = True) -> None:
        self.size = size
        self._spares = spare if size >= _LARGE else None
        self._spare: Spare | None = None
        if size < _LARGE:
            self._held = np.zeros(size + _LINE, np.uint8)
            begin = -self._held.ctypes.data % _LINE
            self.bytes = self._held[begin : begin + size]
            self.at = self.bytes.ctypes.data
            return
        self._spare = _taken(spare, size)
        used = self._spare is not None
        if self._spare is None:
            arena = Arena(size)
            self._spare = Spare(arena, arena.take(size), size)
        self.at = self._spare.at
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.at))
        if used and zeroed:
            self.bytes[:] = 0

    def __del__(self) -> None:
        spares = getattr(self, "_spares", None)
        if spares is not None and self._spare is not None and len(spares) < _SPARES:
            spares.append(self._spare)

    def words(self, offset: int, *shape: int) -> np.ndarray:
        """uint32."""
        return self.bytes[offset : offset + 4 * int(np.prod(shape))].view(np.uint32).reshape(shape)


@dataclass(slots=True)
class Packed:
    """An adapter's records [linears, FIELDS] int64, whose addresses count from the beginning of ``memory``; its size
    and the most lanes.
    """

    records: np.ndarray
    memory: Memory
    bytes: int
    lanes: int


class Places:
    """What the C++ side reads: ``records`` [linears, places + 1, FIELDS]; those of place 0 stay empty."""

    def __init__(self, linears: Sequence[LinearLayout], places: int) -> None:
        self._linears = list(linears)
        self._parts = [linear.part_of() for linear in self._linears]
        self._parts_at = np.array([part.ctypes.data for part in self._parts], np.int64)
        self._sources = [linear.sources() for linear in self._linears]
        self.records = np.zeros((len(self._linears), places + 1, FIELDS), np.int64)
        self.lanes = 0
        self._held: list[Packed | None] = [None] * (places + 1)
        self._spare: list[Spare] = []

    @property
    def places(self) -> int:
        return self.records.shape[1] - 1

    @property
    def columns(self) -> int:
        """Of the first linear."""
        return self._linears[0].columns

    @property
    def form(self) -> str:
        """Names the layout: an adapter that is packed for one model is packed for all of its form."""
        digest = hashlib.sha256(_KIND)
        for linear in self._linears:
            digest.update(f"{linear.widths} {linear.columns} ".encode() + linear.order.tobytes())
        return digest.hexdigest()[:32]

    def prepare(self, deltas: Sequence[Sequence[LowRank | None]]) -> Packed:
        """One adapter's ``deltas``, for each linear one per module, whose sizes are the linear's."""
        plans = [_plan(own) for own in deltas]
        records = np.zeros((len(self._linears), FIELDS), np.int64)
        at = total = 0
        for plan, linear, record in zip(plans, self._linears, records, strict=True):
            if plan is not None:
                sizes = plan.sizes(linear.columns, len(linear.order))
                for field, size in enumerate(sizes):
                    record[field], at = at, at + -(-size // _LINE) * _LINE
                record[4:8] = plan.lanes, plan.rank, plan.bits, linear.columns
                record[8:] = plan.starts + [-1] * (PARTS - len(plan.starts))
                total += sum(sizes)
        memory = Memory(max(at, _LINE), self._spare)
        for plan, own, sources, record in zip(plans, deltas, self._sources, records, strict=True):
            if plan is not None:
                _pack(plan, own, sources, memory, record.tolist())
        return Packed(records, memory, total, max((plan.lanes for plan in plans if plan), default=0))

    def put(self, place: int, packed: Packed | None) -> None:
        """None takes the adapter out."""
        own = self.records[:, place]
        own[:] = 0
        if packed is not None:
            there = packed.records[:, 5] > 0
            own[there] = packed.records[there]
            own[there, :3] += packed.memory.at
            own[there, 3] = self._parts_at[there]
            self.lanes = max(self.lanes, packed.lanes)
        self._held[place] = packed

    def written(self, packed: Packed) -> list[bytes | memoryview]:
        """The parts of a file that :meth:`read` makes the same adapter of."""
        head = _HEAD.pack(_KIND, len(packed.records), packed.lanes, packed.bytes, packed.memory.size)
        return [head, packed.records.tobytes(), packed.memory.bytes.data]

    def read(self, file: RawIOBase) -> Packed:
        """Raises :class:`NotPacked`. Nothing in the file leads C++ out of its memory."""
        size, raw = os.fstat(file.fileno()).st_size, file.read(_HEAD.size)
        if raw is None or len(raw) < _HEAD.size:
            raise NotPacked("it has no head")
        kind, linears, lanes, total, inner = _HEAD.unpack(raw)
        length = len(self._linears) * FIELDS * 8
        if kind != _KIND or linears != len(self._linears) or inner <= 0 or size != _HEAD.size + length + inner:
            raise NotPacked(f"it has {size} bytes and {linears} linears")
        records = np.frombuffer(file.read(length) or b"", np.int64).reshape(-1, FIELDS)
        self._require(records, lanes, inner)
        memory = Memory(inner, self._spare, zeroed=False)
        left = memory.bytes.data
        while left:
            if not (count := file.readinto(left)):
                raise NotPacked("it is cut off")
            left = left[count:]
        return Packed(records, memory, total, lanes)

    def _require(self, records: np.ndarray, most: int, size: int) -> None:
        for record, linear in zip(records.tolist(), self._linears, strict=True):
            at, (lanes, rank, bits, columns), starts = record[:3], record[4:8], record[8:]
            if rank == 0:
                continue
            sizes = _Plan(starts, rank, lanes, bits).sizes(columns, len(linear.order))
            right = (
                columns == linear.columns and bits in (16, 32) and rank > 0 and rank % 2 == 0 and 0 < lanes <= most
                and lanes % GROUP == 0 and all(start >= -1 and start + rank <= lanes for start in starts)
                and all(0 <= first <= size - length for first, length in zip(at, sizes, strict=True))
            )  # fmt: skip
            if not right:
                raise NotPacked("it was packed for another model")


@dataclass(slots=True)
class _Plan:
    """``starts``: the first lane of each module, -1 where it has no adapter; ``rank``: lanes of each that has."""

    starts: list[int]
    rank: int
    lanes: int
    bits: int

    def sizes(self, columns: int, rows: int) -> tuple[int, int, int]:
        """Bytes of A, B and the scales."""
        return self.lanes * columns * self.bits // 8, rows * self.rank * self.bits // 8, 4 * self.lanes


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
    plan: _Plan, deltas: Sequence[LowRank | None], sources: list[_Source], memory: Memory, record: list[int]
) -> None:
    """Where a module fills groups of its own, straight from the file's rows to their place."""
    wide = plan.bits == 32
    kind = np.uint32 if wide else np.uint16
    # Neighbouring columns (of A) and ranks (of B) go in pairs where they have 16 bits.
    wide_a, wide_b = (n * plan.bits // 32 for n in (record[7], plan.rank))
    a = memory.words(record[0], plan.lanes // GROUP, wide_a, GROUP)
    b = memory.words(record[1], _groups_of(sources), wide_b, GROUP)
    scales = memory.words(record[2], plan.lanes).view(np.float32)
    for start, delta, source in zip(plan.starts, deltas, sources, strict=True):
        if delta is None:
            continue
        down, up, rank = _bits(delta.a, wide), _bits(delta.b, wide), len(delta.a)
        scales[start : start + rank] = delta.scale
        lane = start % GROUP
        if lane or rank % GROUP:
            whole = np.zeros((-(-(lane + rank) // GROUP) * GROUP, down.shape[1]), kind)
            whole[lane : lane + rank] = down
            lanes = a[start // GROUP :][: len(whole) // GROUP]
            lanes |= _grouped(whole, wide_a)  # other modules have lanes of the same groups
        else:
            _interleave(down, a, np.arange(start // GROUP, (start + rank) // GROUP))
        if not source.plain or rank != plan.rank:
            ordered = np.zeros((len(source.rows), plan.rank), kind)
            ordered[source.rows >= 0, :rank] = up[source.rows[source.rows >= 0]]
            up = ordered
        _interleave(up, b, source.groups)


def _groups_of(sources: list[_Source]) -> int:
    """Groups of outputs up to the last one that a module has."""
    return 1 + max(int(source.groups[-1]) for source in sources)


def _grouped(rows: np.ndarray, words: int) -> np.ndarray:
    """[groups, 16, words] seen as [groups, words, 16]."""
    return rows.view(np.uint32).reshape(-1, GROUP, words).transpose(0, 2, 1)


def _interleave(rows: np.ndarray, to: np.ndarray, groups: np.ndarray) -> None:
    """Rows by sixteen into some groups [words, 16] of ``to``, in order; by numpy it takes five times as long."""
    words, library = to.shape[1], cpu_library()
    if library is None or not rows.flags.c_contiguous:
        to[groups] = _grouped(rows, words)
        return
    groups = np.ascontiguousarray(groups, np.int64)
    assert rows.nbytes == 4 * GROUP * words * len(groups) and groups[0] >= 0 and groups[-1] < len(to)
    library.interleave(rows.ctypes.data, to.ctypes.data, groups.ctypes.data, len(groups), words)


def _bits(matrix: Tensor, wide: bool) -> np.ndarray:
    matrix = matrix.detach().contiguous()
    if wide:
        return matrix.float().numpy().view(np.uint32)
    return matrix.view(torch.int16).numpy().view(np.uint16)


assert PANEL % GROUP == 0
