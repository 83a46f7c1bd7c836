"""K/V in and out of the engine's cache: copying a stored prefix into blocks, and taking chunks out for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS, blocks_for
from serve_app.engine.request import Request
from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.keys import CHUNK_TOKENS, block_keys, tail_key


@dataclass(slots=True)
class Piece:
    """Tokens [start, start + tokens) as ``data`` [L, 2, n_blocks, Hkv, 32, D]; ``start`` is a multiple of 32."""

    start: int
    tokens: int
    data: Tensor


@dataclass(slots=True)
class StoredPrefix:
    """Contiguous pieces from token 0 (or from where the engine's own cache ends) on."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def begin(self) -> int:
        return self.pieces[0].start if self.pieces else 0

    @property
    def end(self) -> int:
        return self.pieces[-1].start + self.pieces[-1].tokens if self.pieces else 0


def load_prefix(kv: Tensor, blocks: list[int], prefix: StoredPrefix, start: int, end: int) -> None:
    """Copies tokens [start, end) of ``prefix`` into ``blocks`` of ``kv`` [L, 2, num_blocks, Hkv, 32, D].

    ``start`` is a multiple of 32: blocks before it came from the engine's own cache and stay as they are.
    """
    if prefix.begin > start:
        raise ValueError(f"the stored prefix begins at token {prefix.begin}, behind {start}")
    for piece in prefix.pieces:
        first = max(start, piece.start)
        last = min(end, piece.start + piece.tokens)
        if first >= last:
            continue
        offset = (first - piece.start) // BLOCK_TOKENS
        count = blocks_for(last) - first // BLOCK_TOKENS
        target = torch.tensor(blocks[first // BLOCK_TOKENS :][:count], device=kv.device)
        source = piece.data[:, :, offset : offset + count].to(kv.device, non_blocking=True)
        kv.index_copy_(2, target, source)


def take_out(kv: Tensor, blocks: list[int]) -> Tensor:
    """A copy of ``blocks`` as one contiguous CPU tensor [L, 2, len(blocks), Hkv, 32, D]."""
    index = torch.tensor(blocks, device=kv.device)
    return kv.index_select(2, index).cpu().contiguous()


def as_bytes(data: Tensor) -> np.ndarray:
    """The tensor's memory as a flat uint8 array, without a copy; bfloat16 has no numpy type of its own."""
    return data.reshape(-1).view(torch.uint8).numpy()


class ChunkExporter:
    """Cuts what a request has computed into chunks for the pool, while the rest is still being computed.

    ``emit(request id, meta, payload)`` is called in the engine's thread; it must not block.
    """

    def __init__(self, kv: Tensor, dtype_name: str, emit: Callable[[str, ChunkMeta, np.ndarray], None]) -> None:
        self._kv = kv
        self._dtype_name = dtype_name
        self._emit = emit
        self._done: dict[str, int] = {}

    def begin(self, request_id: str, held: int) -> None:
        """Starts a request of whose tokens the pool holds the first ``held`` already."""
        self._done[request_id] = held // CHUNK_TOKENS * CHUNK_TOKENS

    def computed(self, request: Request, computed: int) -> None:
        """Emits every chunk that ``computed`` tokens complete and, at the end of a prefill, the tail as well."""
        done = self._done.get(request.id)
        if done is None:
            return
        while computed - done >= CHUNK_TOKENS:
            self._export(request, done, CHUNK_TOKENS)
            done += CHUNK_TOKENS
        if request.prefill_only and computed >= len(request.tokens) and computed > done:
            self._export(request, done, computed - done)
            done = computed
        self._done[request.id] = done

    def forget(self, request_id: str) -> None:
        self._done.pop(request_id, None)

    def _export(self, request: Request, start: int, tokens: int) -> None:
        end = start + tokens
        keys = block_keys(request.root, request.tokens[: end // BLOCK_TOKENS * BLOCK_TOKENS], known=request.keys)
        tail = request.tokens[end // BLOCK_TOKENS * BLOCK_TOKENS : end]
        data = take_out(self._kv, request.blocks[start // BLOCK_TOKENS : blocks_for(end)])
        parent = keys[-1] if keys else request.root
        meta = ChunkMeta.make(
            root=request.root,
            start_token=start,
            n_tokens=tokens,
            block_keys=keys[start // BLOCK_TOKENS :],
            tail_key=tail_key(parent, tail) if tail else None,
            shape=tuple(data.shape),
            dtype=self._dtype_name,
        )
        self._emit(request.id, meta, as_bytes(data))
