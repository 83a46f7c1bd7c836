"""The paged K/V cache: the one object through which models, kernels and transfers reach keys and values.

Layers of one shape lie in one tensor, a *plane*, so that a block's bytes of all of them are copied by one operation
and compiled code can step from layer to layer::

    plane [layers of this shape, 2, num_blocks, Hkv, 32, D]        2: keys, values;  block 0 belongs to nobody

Latent attention has one part instead of two: its values are the first columns of its keys.

Most models have one plane. A model whose layers differ in heads or head size (Gemma 4) has one for each shape, and a
block's payload is then the planes' bytes one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from serve_app.costs.transfers import Rate
from serve_app.engine.block_copies import raw, write_blocks
from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.gpu.staging import to_device
from serve_app.engine.host_copy import HostCopy
from serve_app.engine.parted import Held, held_whole, put_parts
from serve_app.engine.states import StateShape
from serve_app.kv.chunk import Layout
from serve_app.kv.parts import Payload


@dataclass(slots=True, frozen=True)
class LayerShape:
    """K/V heads and head size of one layer, as this rank holds them. ``shared``: values are the first columns of keys,
    and are not kept beside them.
    """

    kv_heads: int
    head_dim: int
    shared: bool = False

    @property
    def parts(self) -> int:
        """Keys and values, or both in one."""
        return 1 if self.shared else 2


@dataclass(slots=True, frozen=True)
class KVShape:
    """The cache of one model: its layers' shapes and the dtype of keys and values.

    ``rank`` of ``ranks`` workers that share a model's heads; a cache alone is rank 0 of 1.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    rank: int = 0
    ranks: int = 1
    # What layers keep of a text beside them.
    states: StateShape = StateShape()

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVShape:
        """``layers`` layers of one shape."""
        return cls((LayerShape(kv_heads, head_dim),) * layers, dtype)

    def with_more(self, layers: Sequence[LayerShape]) -> KVShape:
        """The same with ``layers`` behind its own."""
        return replace(self, layers=(*self.layers, *layers))

    @property
    def held(self) -> int:
        """How many of its layers lie in this process, the first of the cache that :meth:`allocate` makes."""
        return len(self.layers)

    @property
    def same(self) -> LayerShape | None:
        """The shape that all layers have, or None where they differ."""
        return self.layers[0] if len(set(self.layers)) == 1 else None

    @property
    def token_bytes(self) -> int:
        return sum(layer.parts * layer.kv_heads * layer.head_dim for layer in self.layers) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.token_bytes

    @property
    def slot_bytes(self) -> int:
        """Of a slot of states, in the process that has most of them."""
        return self.states.bytes

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def layout(self) -> Layout:
        """What two caches must have in common to exchange chunks."""
        shapes = [(layer.kv_heads, layer.head_dim, layer.parts) for layer in self.layers]
        return Layout.of(shapes, self.dtype_name, self.dtype.itemsize, self.rank, self.ranks)

    @property
    def state_layout(self) -> Layout | None:
        """The same of states; None where layers keep none."""
        if not self.states.parts:
            return None
        return Layout.of_states([(part.kind, part.size, part.dtype) for part in self.states.parts], self.states.bytes)

    def allocate(self, num_blocks: int, device: str | torch.device, slots: int = 0) -> KVCache:
        """A cache of zeros; ``slots`` of states beside slot 0."""
        return KVCache(self, num_blocks, device, slots)


# Until it is measured: PCIe from memory that is not pinned, and one core that copies.
COPY_BYTES_S = {"cuda": 1.2e10, "cpu": 4e9}


class KVCache:
    """Keys and values of ``num_blocks`` blocks on one device, and ``states``: their parts, [slots, ...] each."""

    __slots__ = ("_held", "_layers", "copies", "device", "num_blocks", "planes", "shape", "states")

    def __init__(self, shape: KVShape, num_blocks: int, device: str | torch.device, slots: int = 0) -> None:
        self.states = shape.states.allocate(1 + slots, device)
        self.shape, self.num_blocks = shape, num_blocks
        self._held: list[Held] | None = None  # of a model in one process, once somebody asks
        # One tensor per distinct shape, in the order in which the shapes first occur.
        self.planes: list[Tensor] = []
        self._layers: list[Tensor] = [torch.empty(0)] * len(shape.layers)
        for distinct in dict.fromkeys(shape.layers):
            members = [i for i, layer in enumerate(shape.layers) if layer == distinct]
            size = (len(members), distinct.parts, num_blocks, distinct.kv_heads, BLOCK_TOKENS, distinct.head_dim)
            plane = torch.zeros(size, dtype=shape.dtype, device=device)
            self.planes.append(plane)
            for at, index in enumerate(members):
                self._layers[index] = plane[at]
        self.device = torch.empty(0, device=device).device
        # Bytes per second that come in, as measured.
        self.copies = Rate(COPY_BYTES_S["cuda" if self.device.type == "cuda" else "cpu"])

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    def layer(self, index: int) -> Tensor:
        """Keys and values of one layer, [2, num_blocks, Hkv, 32, D], or [1, ...] where they are shared; writing to it
        writes to the cache.
        """
        return self._layers[index]

    def copy_out(self, blocks: list[int]) -> Tensor:
        """The payload of ``blocks``: a flat uint8 tensor on the cache's own device, [len(blocks) * block_bytes].

        Plane by plane, each as a contiguous [layers, 2, len(blocks), Hkv, 32, D].
        """
        if not self.planes:  # of layers that keep states alone: chunks stand for their tokens, and have a byte a block
            return torch.zeros(len(blocks) * self.shape.layout.block_bytes, dtype=torch.uint8, device=self.device)
        index = self.index(blocks)
        parts = [raw(plane).index_select(2, index).view(torch.uint8).flatten() for plane in self.planes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def export(self, chunk_id: str, blocks: list[int]) -> Callable[[], np.ndarray]:
        """What ``blocks`` hold now, as :meth:`copy_out` and in host memory, in whatever thread it is asked for; of a
        worker of several ranks this one's part, while the others keep theirs under the chunk's name.
        """
        return HostCopy(self.copy_out(blocks))

    def copy_within(self, sources: list[int], targets: list[int]) -> None:
        """Overwrites blocks ``targets`` with ``sources``, all of which are read first."""
        read, written = self.index(sources), self.index(targets)
        for plane in map(raw, self.planes):
            write_blocks(plane, targets, written, plane.index_select(2, read))

    def copy_in(self, blocks: list[int], payload: Tensor | Payload, first: int = 0) -> None:
        """Overwrites ``blocks`` with as many blocks of ``payload`` (see :meth:`copy_out`), from its ``first`` on.

        ``payload`` may lie on another device. Raises ValueError where it is no whole number of this cache's blocks, or
        ends before the last one that is asked for, or has not all layers and heads.
        """
        if not self.planes:
            return
        if isinstance(payload, Payload):
            began = time.perf_counter()
            if self._held is None:
                self._held = held_whole(self.shape)
            put_parts(self, self._held, blocks, payload, first)
            self.copies.add(len(blocks) * self.shape.block_bytes, time.perf_counter() - began)
            return
        held, rest = divmod(payload.numel(), self.shape.block_bytes)
        if payload.dtype != torch.uint8 or rest or first + len(blocks) > held:
            raise ValueError(
                f"a payload of {payload.numel()} bytes does not hold blocks {first} to {first + len(blocks)} of "
                f"{self.shape.block_bytes} bytes; only caches of one layout can exchange them"
            )
        began = time.perf_counter()
        index, at = self.index(blocks), 0
        for plane in self.planes:
            layers, two, _, heads, tokens, dim = plane.shape
            size = held * plane[:, :, 0].numel() * plane.itemsize
            part = payload[at : at + size].view(plane.dtype).view(layers, two, held, heads, tokens, dim)
            source = part[:, :, first : first + len(blocks)].to(self.device, non_blocking=True)
            write_blocks(raw(plane), blocks, index, raw(source))
            at += size
        # From memory that is not pinned a copy to a GPU has ended, or nearly, when the call returns.
        self.copies.add(len(blocks) * self.shape.block_bytes, time.perf_counter() - began)

    def state_out(self, slot: int) -> Tensor:
        """The states in ``slot``, a flat uint8 tensor of its own on the cache's device."""
        return torch.cat([plane[slot].flatten().view(torch.uint8) for plane in self.states])

    def state_in(self, slot: int, payload: Tensor) -> None:
        """Overwrites ``slot`` with what :meth:`state_out` gave; ``payload`` may lie on another device. Raises
        ValueError for one of another size."""
        if payload.dtype != torch.uint8 or payload.numel() != self.shape.states.bytes:
            raise ValueError(f"{payload.numel()} bytes are not states of {self.shape.states.bytes}")
        at = 0
        for plane in self.states:
            size = plane[slot].numel() * plane.itemsize
            # Aligned anew: a part may begin anywhere in the payload.
            part = payload[at : at + size].clone().view(plane.dtype).view(plane.shape[1:])
            plane[slot].copy_(part, non_blocking=True)
            at += size

    def index(self, blocks: list[int]) -> Tensor:
        """int64 on the cache's device, without waiting for the steps that are under way there."""
        return to_device([np.array(blocks, np.int64)], self.device)[0]
