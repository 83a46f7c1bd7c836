"""A paged cache whose heads and layers lie on several ranks, seen from rank 0 as one.

Chunks in the shared pool have every layer and every head, whoever has computed them: so a worker of four ranks hands
over to one of two, or of one. Rank 0 puts a block's bytes together from the ranks' parts, and hands them out::

    payload    plane [layers, 2, blocks, Hkv, 32, D]
    rank n     its layers ^                 ^ its heads
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_app.costs.transfers import Rate
from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.kv_cache import COPY_BYTES_S, KVCache, KVShape, LayerShape
from serve_app.engine.states import StatePart, StateShape
from serve_app.parallel.group import Group
from serve_app.parallel.link import Leader
from serve_app.parallel.place import Place
from serve_app.wire.ranks import (
    RankAllocate,
    RankCopyIn,
    RankCopyOut,
    RankLayer,
    RankStateIn,
    RankStateOut,
    RankStatePart,
)

# Payloads that may be on their way from ranks: chunks that nobody wants any more are among them.
COMING = 16
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
    """The ranks' layers by their place among those that have keys and values, where others keep states."""
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
    ) -> GroupShape:
        layers = whole_shape(parts, dtype).layers
        # One stage's behind another's, as one process has them.
        kept = [part.shape.states for part in parts[:: group.place.tensor]]
        states = StateShape(tuple(each for shape in kept for each in shape.parts), any(shape.single for shape in kept))
        return cls(layers, dtype, states=states, parts=tuple(parts), group=group, leader=leader, on_failure=on_failure)

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

    def allocate(self, num_blocks: int, device: str | torch.device, slots: int = 0) -> KVCache:
        """On every rank; this is rank 0's."""
        self.leader.tell(RankAllocate(num_blocks, slots))
        return GroupCache(self, num_blocks, device, slots)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside is done by all ranks or ends the worker."""
        try:
            yield
        except BaseException as error:
            self.on_failure(error)
            raise


class Gathering:
    """A payload of ``blocks`` blocks whose ``parts`` come from the ranks. Calling it waits, in any thread."""

    def __init__(self, whole: GroupShape, blocks: int) -> None:
        self._whole, self._blocks = whole, blocks
        # Rank -> its bytes, and what to wait for, once.
        self.parts: dict[int, tuple[Tensor, Any]] = {}
        self.arrived = False
        self._waiting = threading.Lock()

    def wait(self) -> None:
        with self._waiting, self._whole.together():
            if not self.arrived:
                for _, work in self.parts.values():
                    if work is not None:
                        work.wait()
                self.arrived = True

    def __call__(self) -> Tensor:
        self.wait()
        whole = self._whole
        payload = torch.empty(self._blocks * whole.layout.block_bytes, dtype=torch.uint8, device=whole.group.device)
        targets = views(whole, payload, self._blocks)
        for rank, (data, _) in self.parts.items():
            place, part = replace(whole.group.place, rank=rank), whole.parts[rank]
            for layer, view in zip(part.layers, views(part.shape, data, self._blocks), strict=True):
                if owns(layer, place):
                    targets[layer.layer][:, :, layer.first_head : layer.first_head + layer.heads] = view
        return payload


class GroupCache(KVCache):
    """Rank 0's part, through which the others' are copied as well. Called in the engine's thread alone, as steps
    are.
    """

    __slots__ = ("coming", "own", "whole")

    def __init__(self, shape: GroupShape, num_blocks: int, device: str | torch.device, slots: int = 0) -> None:
        self.own = own = shape.parts[0].shape.allocate(num_blocks, device, slots)
        self.shape = self.whole = shape
        self.states = own.states
        self.num_blocks, self.device, self.planes, self._layers = num_blocks, own.device, own.planes, own._layers
        self.copies = Rate(COPY_BYTES_S["cuda" if own.device.type == "cuda" else "cpu"])
        self.coming: deque[Gathering] = deque()

    def copy_out(self, blocks: list[int]) -> Tensor:
        """The payload of ``blocks``, of all layers and heads, on rank 0's device."""
        if not self.whole.layers:  # which keep states alone
            return self.own.copy_out(blocks)
        found = self._gather(blocks)
        with self.whole.group.waiting.counted():
            found.wait()
        return found()

    def copy_out_beside(self, blocks: list[int]) -> Callable[[], Tensor] | None:
        if self.device.type != "cpu" or not self.whole.layers:
            return None
        while self.coming and (self.coming[0].arrived or len(self.coming) >= COMING):
            self.coming.popleft().wait()
        self.coming.append(self._gather(blocks))
        return self.coming[-1]

    def _gather(self, blocks: list[int]) -> Gathering:
        whole, group = self.whole, self.whole.group
        found = Gathering(whole, len(blocks))
        with whole.together():
            whole.leader.tell(RankCopyOut(_ids(blocks)))
            for rank, part in enumerate(whole.parts):
                if any(owns(layer, replace(group.place, rank=rank)) for layer in part.layers):
                    size = len(blocks) * part.shape.block_bytes
                    found.parts[rank] = group.taking_bytes(size, rank) if rank else (self.own.copy_out(blocks), None)
        return found

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

    def copy_in(self, blocks: list[int], payload: Tensor, first: int = 0) -> None:
        """Overwrites ``blocks`` on every rank; as :meth:`KVCache.copy_in`."""
        if not self.whole.layers:
            return
        each = self.whole.layout.block_bytes
        held, rest = divmod(payload.numel(), each)
        if payload.dtype != torch.uint8 or rest or first + len(blocks) > held:
            raise ValueError(
                f"a payload of {payload.numel()} bytes does not hold blocks {first} to {first + len(blocks)} of "
                f"{each} bytes; only caches of one layout can exchange them"
            )
        began = time.perf_counter()
        with self.whole.together():
            self._hand_out(blocks, payload, first, held)
        self.copies.add(len(blocks) * each, time.perf_counter() - began)

    def _hand_out(self, blocks: list[int], payload: Tensor, first: int, held: int) -> None:
        """``held``: blocks of the payload."""
        whole, group = self.whole, self.whole.group
        whole.leader.tell(RankCopyIn(_ids(blocks)))
        sources = views(whole, payload, held)
        for rank, part in enumerate(whole.parts):
            data = torch.empty(len(blocks) * part.shape.block_bytes, dtype=torch.uint8, device=self.device)
            for layer, view in zip(part.layers, views(part.shape, data, len(blocks)), strict=True):
                heads = slice(layer.first_head, layer.first_head + layer.heads)
                view.copy_(sources[layer.layer][:, first : first + len(blocks), heads])
            if rank:
                group.send_bytes(data, rank)
            else:
                self.own.copy_in(blocks, data)


def first_head(place: Place, heads: int, all_heads: int) -> int:
    """Where a rank's ``heads`` of a layer's ``all_heads`` begin: fewer heads than ranks lie on several of them."""
    return 0 if heads == all_heads else place.part * all_heads // place.tensor


def owns(layer: RankLayer, place: Place) -> bool:
    """Whether no rank before this one has the same heads of the layer."""
    before = replace(place, rank=place.rank - 1)
    return place.part == 0 or layer.first_head != first_head(before, layer.heads, layer.all_heads)


def views(shape: KVShape, payload: Tensor, blocks: int) -> list[Tensor]:
    """Each layer's [parts, blocks, Hkv, 32, bytes of a head] of a flat payload, which lies plane by plane."""
    found: list[Tensor] = [payload] * len(shape.layers)
    at = 0
    for distinct in dict.fromkeys(shape.layers):
        members = [i for i, layer in enumerate(shape.layers) if layer == distinct]
        width = distinct.head_dim * shape.dtype.itemsize
        size = (len(members), distinct.parts, blocks, distinct.kv_heads, BLOCK_TOKENS, width)
        count = int(np.prod(size))
        plane = payload[at : at + count].view(size)
        at += count
        for place, index in enumerate(members):
            found[index] = plane[place]
    return found


def _ids(blocks: list[int]) -> bytes:
    return np.array(blocks, np.int32).tobytes()
