"""K/V in and out of the engine's cache: copying a stored prefix into blocks, and taking chunks out for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS, blocks_for
from serve_app.engine.branches import name_at
from serve_app.engine.host_copy import HostCopy
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.request import Request
from serve_app.engine.state_slots import last_border
from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.keys import CHUNK_TOKENS, block_keys, state_key, tail_key
from serve_app.kv.parts import Payload


@dataclass(slots=True)
class LoadedPiece:
    """Tokens [start, start + tokens), ``start`` a multiple of 32, from block ``first`` of ``payload`` on.

    The payload is flat uint8, as :meth:`~serve_app.engine.kv_cache.KVCache.copy_out` gives it, or in parts.
    """

    start: int
    tokens: int
    payload: Tensor | Payload
    first: int = 0


@dataclass(slots=True)
class StoredPrefix:
    """Contiguous pieces from token 0 (or from where the engine's own cache ends) on. ``state``: the states behind its
    end, a flat uint8 tensor, of a model that keeps any; ``stop``: where that is, if pieces have more.
    """

    pieces: list[LoadedPiece] = field(default_factory=list)
    state: Tensor | None = None
    stop: int | None = None

    @property
    def begin(self) -> int:
        return self.pieces[0].start if self.pieces else 0

    @property
    def end(self) -> int:
        if self.stop is not None:
            return self.stop
        return self.pieces[-1].start + self.pieces[-1].tokens if self.pieces else 0


def load_prefix(kv: KVCache, blocks: list[int], prefix: StoredPrefix, start: int, end: int) -> None:
    """Copies tokens [start, end) of ``prefix`` into ``blocks`` of ``kv``.

    ``start`` is a multiple of 32: blocks before it came from the engine's own cache and stay as they are.
    """
    if prefix.begin > start:
        raise ValueError(f"the stored prefix begins at token {prefix.begin}, behind {start}")
    for piece in prefix.pieces:
        first = max(start, piece.start)
        last = min(end, piece.start + piece.tokens)
        if first >= last:
            continue
        target = blocks[first // BLOCK_TOKENS : blocks_for(last)]
        kv.copy_in(target, piece.payload, piece.first + (first - piece.start) // BLOCK_TOKENS)


# A finished answer that adds less than this to what the pool holds is not worth an object of its own.
MIN_NEW_TOKENS = 2 * BLOCK_TOKENS

Emit = Callable[[str, ChunkMeta, Callable[[], np.ndarray]], None]


class ChunkExporter:
    """Cuts what a request has computed into chunks for the pool, while the rest is still being computed.

    ::

        tokens   0        256        512   600      held: what the pool has of it already
                 |---------|----------|-----|
                 [  held       ][ new       ]       chunks end at multiples of 256; the last one where the request ends

    A chunk begins at a multiple of 256 and so takes the place of shorter ones before it, if at least half of it is new;
    otherwise it begins where the pool's tokens end, so that bytes at most double and many short answers behind one
    long prompt stay small. Only tokens that stand are exported, never a draft's: the engine calls after its commit.

    A prefill ends with its tail, which the decode worker asks for at once. A generated answer ends with its last full
    block (if that adds :data:`MIN_NEW_TOKENS`): the conversation's next prompt goes on behind it, so that its tail's
    key would never be asked for.

    ``emit(request id, meta, copy)`` is called in the engine's thread and must not block for long; ``copy()`` gives the
    payload, or this process's part of it, in any thread.
    """

    def __init__(
        self,
        kv: KVCache,
        emit: Emit,
        states: Callable[[bytes], int] = lambda key: 0,
        admit: Callable[[str, ChunkMeta], bool] = lambda request_id, meta: True,
    ) -> None:
        """``states``: the slot where the states behind a block or tail are kept, 0 for none; ``admit``: whether there
        is room for a chunk, asked before it is cut out.
        """
        self._admit = admit
        self._kv = kv
        self._states = states
        self._layout = kv.shape.layout
        self._emit = emit
        self._done: dict[str, int] = {}

    def begin(self, request_id: str, held: int) -> None:
        """Starts a request of whose tokens the pool holds the first ``held``; again, if it turns out to hold less."""
        self._done[request_id] = held

    def computed(self, request: Request, blocks: list[int], computed: int, *, last: bool = False) -> None:
        """Emits every chunk that the first ``computed`` tokens, in ``blocks``, complete, and if they are the ``last``
        ones the rest.
        """
        done = self._done.get(request.id)
        if done is None:
            return
        while (end := (done // CHUNK_TOKENS + 1) * CHUNK_TOKENS) <= computed:
            self._export(request, blocks, done, end)
            done = end
        if last:
            whole = request.prefill_only and computed >= len(request.tokens)
            end = computed if whole else computed // BLOCK_TOKENS * BLOCK_TOKENS
            if end - done >= (1 if whole else MIN_NEW_TOKENS):
                self._export(request, blocks, done, end)
                done = end
        self._done[request.id] = done
        if self._kv.shape.states.parts:
            self._export_state(request, computed, last)

    def _export_state(self, request: Request, end: int, last: bool) -> None:
        """Of a long prompt's last border, and of a prefill's end."""
        whole = last and request.prefill_only and end == len(request.tokens)
        if not end or not (whole or (end >= CHUNK_TOKENS and end == last_border(request))):
            return
        key = name_at(request, end)
        if not (slot := self._states(key)):
            return
        layout = self._kv.shape.state_layout
        assert layout is not None
        named = ChunkMeta.make(
            root=request.root, start_token=0, n_tokens=BLOCK_TOKENS, block_keys=[state_key(key)], tail_key=None,
            layout=layout, tenant=request.tenant,
        )  # fmt: skip
        if self._admit(request.id, named):
            self._emit(request.id, named, HostCopy(self._kv.state_out(slot)))

    def forget(self, request_id: str) -> None:
        self._done.pop(request_id, None)

    def _export(self, request: Request, blocks: list[int], held: int, end: int) -> None:
        floor = held // CHUNK_TOKENS * CHUNK_TOKENS
        start = floor if end - held >= held - floor else held // BLOCK_TOKENS * BLOCK_TOKENS
        full, media = end // BLOCK_TOKENS * BLOCK_TOKENS, request.media
        keys = block_keys(request.root, request.tokens[:full], known=request.keys, media=media)
        tail = request.tokens[full:end]
        parent = keys[-1] if keys else request.root
        meta = ChunkMeta.make(
            root=request.root,
            start_token=start,
            n_tokens=end - start,
            block_keys=keys[start // BLOCK_TOKENS :],
            tail_key=tail_key(parent, tail, media=media, start=full) if tail else None,
            layout=self._layout,
            tenant=request.tenant,
        )
        if self._admit(request.id, meta):
            taken = blocks[start // BLOCK_TOKENS : blocks_for(end)]
            self._emit(request.id, meta, self._kv.export(meta.chunk_id, taken))
