"""K/V that arrive before their request: copied into free blocks, where the request finds them like its own."""

from __future__ import annotations

import torch

from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.engine import Engine
from serve_app.engine.kv_io.transfer import LoadedPiece, StoredPrefix, load_prefix


def preload(engine: Engine, keys: list[bytes], piece: LoadedPiece) -> int:
    """Copies the full blocks of ``piece`` into the cache, in the engine's thread between two steps; returns how many.

    ``keys`` name the prompt's blocks from the first on. The blocks belong to nobody afterwards: they are cache hits
    waiting to happen, and may be given to others. Nothing is copied when there is no room, or the blocks are here.
    """
    pool = engine.scheduler.blocks
    first, last = piece.start // BLOCK_TOKENS, (piece.start + piece.tokens) // BLOCK_TOKENS
    while first < last and pool.match([keys[first]]):
        first += 1
    if first == last or not pool.can_allocate(last - first):
        return 0
    blocks = pool.allocate(last - first)
    with torch.inference_mode():
        load_prefix(
            engine.runner.kv, [0] * first + blocks, StoredPrefix([piece]), first * BLOCK_TOKENS, last * BLOCK_TOKENS
        )
    for block, key in zip(blocks, keys[first:last], strict=True):
        pool.seal(block, key)
    pool.release(blocks)
    return len(blocks)
