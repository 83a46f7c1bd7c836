"""A paged cache whose heads and layers lie on several ranks, seen from rank 0 as one.

Chunks in the shared pool have every layer and every head, whoever has computed them, so a worker of four ranks hands
over to one of two, or of one. No rank has another's bytes in its hands: each gives the pool its part of a chunk, and
takes its layers and heads from what others gave (:mod:`serve_app.engine.parted`). Rank 0 says which blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from serve_app.costs.transfers import Rate
from serve_app.engine.host_copy import HostCopy
from serve_app.engine.kv_cache import COPY_BYTES_S, KVCache, KVShape, LayerShape
from serve_app.engine.parted import Held, held, held_whole, part_of, put_parts, take_part
from serve_app.engine.states import StatePart, StateShape
from serve_app.kv.parts import Payload
from serve_app.parallel.group import Group
from serve_app.parallel.link import Leader
from serve_app.parallel.place import Place
from serve_app.wire.parts import Part
from serve_app.wire.ranks import (
    RankAllocate,
    RankCopy,
    RankCopyIn,
    RankDrop,
    RankExport,
    RankLayer,
    RankStateIn,
    RankStateOut,
    RankStatePart,
)

NONE = StateShape()


@dataclass(slots=True, frozen=True)
class CacheShard:
    """What one rank holds: its cache's own shape, and where each of its layers belongs. States lie whole on all ranks
    of a stage.
    """

    shape: KVShape
    layers: tuple[RankLayer, ...]

    @classmethod
    def of(cls, layers: tuple[RankLayer, ...], dtype: torch.dtype, states: StateShape = NONE) -> CacheShard:
        sizes = tuple(LayerShape(layer.heads, layer.head_dim, layer.shared) for layer in layers)
        return cls(KVShape(sizes, dtype, states=states), layers)

    def numbered(self, numbers: Sequence[int]) -> CacheShard:
        """The same with these numbers for its layers."""
        if not numbers:
            return self
        layers = zip(self.layers, numbers, strict=True)
        return replace(self, layers=tuple(msgspec.structs.replace(layer, layer=number) for layer, number in layers))

    def runs(self) -> list[Held]:
        """What it holds of the whole model."""
        return held(self.shape, [each.layer for each in self.layers], [each.first_head for each in self.layers])

    def owned(self, place: Place) -> list[Held]:
        """What it gives to the pool: what no rank before has as well."""
        layers = self.layers
        only = [owns(each, place) for each in layers]
        return held(self.shape, [each.layer for each in layers], [each.first_head for each in layers], only)


def told_states(states: StateShape) -> tuple[RankStatePart, ...]:
    """As a rank tells them."""
    return tuple(
        RankStatePart(part.layer, part.kind, part.number, part.size, str(part.dtype).removeprefix("torch."))
        for part in states.parts
    )


def states_told(parts: Sequence[RankStatePart], *, single: bool) -> StateShape:
    """What :func:`told_states` gave."""
    return StateShape(
        tuple(StatePart(p.layer, p.kind, p.number, tuple(p.size), getattr(torch, p.dtype)) for p in parts), single
    )


def numbered(parts: Sequence[tuple[RankLayer, ...]]) -> list[tuple[RankLayer, ...]]:
    """The ranks' layers by their place among those of the cache: some of a model may have no keys and values, and
    indexers' keys come behind all of these."""
    places = {layer: at for at, layer in enumerate(sorted({each.layer for part in parts for each in part}))}
    return [
        tuple(
            RankLayer(places[each.layer], each.heads, each.first_head, each.all_heads, each.head_dim, each.shared)
            for each in part
        )
        for part in parts
    ]


def whole_shape(parts: list[CacheShard], dtype: torch.dtype) -> KVShape:
    """The shape of the whole model's cache. Raises ValueError where the parts do not make one."""
    found: dict[int, LayerShape] = {}
    for part in parts:
        for layer in part.layers:
            size = LayerShape(layer.all_heads, layer.head_dim, layer.shared)
            if found.setdefault(layer.layer, size) != size:
                raise ValueError(f"ranks differ in the cache of layer {layer.layer}")
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"ranks hold layers {sorted(found)}, which are not all of a model")
    return KVShape(tuple(found[i] for i in range(len(found))), dtype)


@dataclass(slots=True, frozen=True)
class GroupShape(KVShape):
    """The cache of a model that lies on several ranks, whose ``parts`` these are. ``block_bytes`` are those of the
    fullest rank, by which rooms are measured; :attr:`layout` is the whole model's.
    """

    parts: tuple[CacheShard, ...] = ()
    group: Any = None
    leader: Any = None
    # Ranks on other nodes than rank 0's.
    away: frozenset[int] = frozenset()
    # The other ranks' actors.
    handles: Sequence[Any] = ()
    # Ends the worker: a copy that fails leaves ranks at different places.
    on_failure: Callable[[BaseException], None] = lambda error: None

    @classmethod
    def of(
        cls,
        parts: list[CacheShard],
        dtype: torch.dtype,
        group: Group,
        leader: Leader,
        on_failure: Callable[[BaseException], None],
        *,
        away: frozenset[int] = frozenset(),
        handles: Sequence[Any] = (),
    ) -> GroupShape:
        layers = whole_shape(parts, dtype).layers
        # One stage's behind another's, as one process has them.
        kept = [part.shape.states for part in parts[:: group.place.tensor]]
        states = StateShape(tuple(each for shape in kept for each in shape.parts), any(shape.single for shape in kept))
        return cls(
            layers, dtype, states=states, parts=tuple(parts), group=group, leader=leader, away=away, handles=handles,
            on_failure=on_failure,
        )  # fmt: skip

    def with_more(self, layers: Sequence[LayerShape]) -> GroupShape:
        """Rank 0 alone computes with ``layers``, and has all of their heads."""
        own, at = self.parts[0], len(self.layers)
        more = [
            RankLayer(at + i, layer.kv_heads, 0, layer.kv_heads, layer.head_dim, layer.shared)
            for i, layer in enumerate(layers)
        ]
        first = CacheShard(own.shape.with_more(layers), (*own.layers, *more))
        return replace(self, layers=(*self.layers, *layers), parts=(first, *self.parts[1:]))

    @property
    def held(self) -> int:
        return len(self.parts[0].layers)

    @property
    def block_bytes(self) -> int:
        return max(part.shape.block_bytes for part in self.parts)

    @property
    def slot_bytes(self) -> int:
        return max(part.shape.slot_bytes for part in self.parts)

    @property
    def one_piece(self) -> Part:
        """How a chunk that one process has made lies."""
        return part_of(held_whole(self))

    def published(self) -> dict[int, Part]:
        """What each rank gives to the pool, rank 0 and those that give anything."""
        found = {}
        for rank, part in enumerate(self.parts):
            owned = part.owned(replace(self.group.place, rank=rank))
            if owned or not rank:
                found[rank] = part_of(owned, away=rank in self.away)
        return found

    def allocate(self, num_blocks: int, device: str | torch.device, slots: int = 0) -> KVCache:
        """On every rank; this is rank 0's."""
        one_piece = self.one_piece
        for rank, part in enumerate(self.parts[1:], 1):
            numbers = tuple(each.layer for each in part.layers)
            self.leader.tell_one(rank, RankAllocate(num_blocks, slots, numbers, one_piece))
        return GroupCache(self, num_blocks, device, slots)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside is done by all ranks or ends the worker."""
        try:
            yield
        except BaseException as error:
            self.on_failure(error)
            raise


class GroupCache(KVCache):
    """Rank 0's part, and what tells the others of what is done to theirs. Called in the engine's thread alone, as
    steps are.
    """

    __slots__ = ("one_piece", "own", "owned", "parts", "runs", "whole")

    def __init__(self, shape: GroupShape, num_blocks: int, device: str | torch.device, slots: int = 0) -> None:
        mine = shape.parts[0]
        self.own = own = mine.shape.allocate(num_blocks, device, slots)
        self.shape = self.whole = shape
        self.states = own.states
        self.num_blocks, self.device, self.planes, self._layers = num_blocks, own.device, own.planes, own._layers
        self.copies = Rate(COPY_BYTES_S["cuda" if own.device.type == "cuda" else "cpu"])
        self.runs, self.owned = mine.runs(), mine.owned(shape.group.place)
        self.parts, self.one_piece = shape.published(), shape.one_piece

    def copy_out(self, blocks: list[int]) -> Tensor:
        """No rank has all of a block."""
        raise TypeError("blocks of several ranks leave by export()")

    def export(self, chunk_id: str, blocks: list[int]) -> Callable[[], np.ndarray]:
        whole = self.whole
        if not whole.layers:  # which keep states alone
            return self.own.export(chunk_id, blocks)
        with whole.together():
            whole.leader.tell(RankExport(chunk_id, _ids(blocks)))
            return HostCopy(take_part(self.own, self.owned, blocks))

    def copy_within(self, sources: list[int], targets: list[int]) -> None:
        with self.whole.together():
            self.whole.leader.tell(RankCopy(_ids(sources), _ids(targets)))
            self.own.copy_within(sources, targets)

    def copy_in(self, blocks: list[int], payload: Tensor | Payload, first: int = 0) -> None:
        """Overwrites ``blocks`` on every rank with what each has read of ``payload``; as :meth:`KVCache.copy_in`."""
        if not self.whole.layers:
            return
        if not isinstance(payload, Payload):
            raise ValueError("ranks copy what they have read themselves")
        began = time.perf_counter()
        with self.whole.together():
            self.whole.leader.tell(RankCopyIn(_ids(blocks), payload.ticket, first))
            put_parts(self.own, self.runs, blocks, of_whole(payload, self.one_piece), first)
        self.copies.add(len(blocks) * self.whole.layout.block_bytes, time.perf_counter() - began)

    def drop(self, tickets: Sequence[int]) -> None:
        """Nobody here needs what the other ranks have read under these."""
        self.whole.leader.tell(RankDrop(tuple(tickets)))

    def state_out(self, slot: int) -> Tensor:
        whole, group = self.whole, self.whole.group
        with whole.together():
            whole.leader.tell(RankStateOut(slot))
            found = []
            for rank, part in self._stages():
                found.append(group.take_bytes(part.shape.states.bytes, rank) if rank else self.own.state_out(slot))
        return torch.cat(found)

    def state_in(self, slot: int, payload: Tensor) -> None:
        whole, group = self.whole, self.whole.group
        if payload.dtype != torch.uint8 or payload.numel() != whole.states.bytes:
            raise ValueError(f"{payload.numel()} bytes are not states of {whole.states.bytes}")
        with whole.together():
            whole.leader.tell(RankStateIn(slot))
            at = 0
            for first, part in self._stages():
                data = payload[at : at + part.shape.states.bytes].to(self.device)
                at += len(data)
                for rank in range(first, first + group.place.tensor):
                    if rank:
                        group.send_bytes(data, rank)
                    else:
                        self.own.state_in(slot, data)

    def _stages(self) -> list[tuple[int, CacheShard]]:
        """The first rank of each stage whose layers keep states, and what it holds."""
        each = self.whole.group.place.tensor
        return [
            (rank, part) for rank, part in enumerate(self.whole.parts) if rank % each == 0 and part.shape.states.parts
        ]


def first_head(place: Place, heads: int, all_heads: int) -> int:
    """Where a rank's ``heads`` of a layer's ``all_heads`` begin: fewer heads than ranks lie on several of them."""
    return 0 if heads == all_heads else place.part * all_heads // place.tensor


def owns(layer: RankLayer, place: Place) -> bool:
    """Whether no rank before this one has the same heads of the layer."""
    before = replace(place, rank=place.rank - 1)
    return place.part == 0 or layer.first_head != first_head(before, layer.heads, layer.all_heads)


def of_whole(payload: Payload, whole: Part) -> Payload:
    """A payload whose parts are named, where it is one piece: that is ``whole``."""
    return replace(payload, parts=(whole,)) if payload.one_piece else payload


def _ids(blocks: list[int]) -> bytes:
    return np.array(blocks, np.int32).tobytes()
