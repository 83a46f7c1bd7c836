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
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import RawIOBase

import numpy as np

from serve_app.kernels.linear.delta import LowRank
from serve_app.kernels.linear.packing import FIELDS, GROUP, LINE, LinearLayout, Plan, Recipe
from serve_app.kernels.linear.panels import Arena
from serve_app.kernels.linear.quantize import PANEL

# What is read from memory of its own, in huge pages, and does not waste most of one; and how many of those that are
# gone are kept for others.
_LARGE = 1 << 20
_SPARES = 2
# Of a file: what it is, its linears, the most lanes, the adapter's bytes and those of its memory, the CRC-32 of what
# comes behind.
_HEAD = struct.Struct("<8s5q")
_KIND = b"places-2"


class NotPacked(ValueError):
    """A file that is no adapter packed for this model."""


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
            self._held = (np.zeros if zeroed else np.empty)(size + LINE, np.uint8)
            begin = -self._held.ctypes.data % LINE
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
        """One adapter's ``deltas``, for each linear one per module, whose sizes are the linear's. Raises ValueError if
        a number is not finite.
        """
        packed = self.pack(self.recipe(deltas))
        if packed is None:
            raise ValueError("an adapter has numbers that are not finite")
        return packed

    def recipe(self, deltas: Sequence[Sequence[LowRank | None]]) -> Recipe:
        """How they are packed."""
        return Recipe.of(self._linears, self._sources, deltas)

    def pack(self, recipe: Recipe, data: bytes | None = None) -> Packed | None:
        """What the recipe reads, of the file ``data`` if it is one of any file; None if a number is not finite."""
        memory = Memory(max(recipe.size, LINE), self._spare, zeroed=recipe.holes)
        return Packed(recipe.records, memory, recipe.total, recipe.lanes) if recipe.pack(memory.at, data) else None

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
        records, memory = packed.records.tobytes(), packed.memory.bytes.data
        crc = zlib.crc32(memory, zlib.crc32(records))
        head = _HEAD.pack(_KIND, len(packed.records), packed.lanes, packed.bytes, packed.memory.size, crc)
        return [head, records, memory]

    def read(self, file: RawIOBase) -> Packed:
        """Raises :class:`NotPacked`. Nothing in the file leads C++ out of its memory."""
        size, raw = os.fstat(file.fileno()).st_size, file.read(_HEAD.size)
        if raw is None or len(raw) < _HEAD.size:
            raise NotPacked("it has no head")
        kind, linears, lanes, total, inner, crc = _HEAD.unpack(raw)
        length = len(self._linears) * FIELDS * 8
        if kind != _KIND or linears != len(self._linears) or inner <= 0 or size != _HEAD.size + length + inner:
            raise NotPacked(f"it has {size} bytes and {linears} linears")
        told = file.read(length) or b""
        records = np.frombuffer(told, np.int64).reshape(-1, FIELDS)
        self._require(records, lanes, inner)
        memory = Memory(inner, self._spare, zeroed=False)
        left = memory.bytes.data
        while left:
            if not (count := file.readinto(left)):
                raise NotPacked("it is cut off")
            left = left[count:]
        if zlib.crc32(memory.bytes.data, zlib.crc32(told)) != crc:
            raise NotPacked("it is damaged")
        return Packed(records, memory, total, lanes)

    def _require(self, records: np.ndarray, most: int, size: int) -> None:
        for record, linear in zip(records.tolist(), self._linears, strict=True):
            at, (lanes, rank, bits, columns), starts = record[:3], record[4:8], record[8:]
            if rank == 0:
                continue
            sizes = Plan(starts, rank, lanes, bits).sizes(columns, len(linear.order))
            right = (
                columns == linear.columns and bits in (16, 32) and rank > 0 and rank % 2 == 0 and 0 < lanes <= most
                and lanes % GROUP == 0 and all(start >= -1 and start + rank <= lanes for start in starts)
                and all(0 <= first <= size - length for first, length in zip(at, sizes, strict=True))
            )  # fmt: skip
            if not right:
                raise NotPacked("it was packed for another model")


assert PANEL % GROUP == 0
