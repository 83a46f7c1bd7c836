"""Chunks for tests: made from token lists, with contents that tell one chunk from another."""

from __future__ import annotations

import numpy as np

from serve_app.kv.chunk import ChunkMeta, Layout
from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS, block_keys, root_key, tail_key

LAYOUT = Layout.of([(2, 8)] * 2, "bfloat16", 2)


def root(tenant: str = "a") -> bytes:
    return root_key(b"weights", "", tenant.encode())


def prompt_keys(tokens: list[int], base: bytes) -> tuple[list[bytes], list[bytes]]:
    """Keys of the full blocks, and of the tail if there is one."""
    keys = block_keys(base, np.array(tokens, dtype=np.int32))
    tail = tokens[len(keys) * BLOCK_TOKENS :]
    return keys, [tail_key(keys[-1] if keys else base, tail)] if tail else []


def cut(
    tokens: list[int], base: bytes, layout: Layout = LAYOUT, size: int = CHUNK_TOKENS, tenant: bytes = b""
) -> list[ChunkMeta]:
    """All chunks of a prompt, the last one with its tail."""
    keys, tails = prompt_keys(tokens, base)
    metas = []
    for start in range(0, len(tokens), size):
        count = min(size, len(tokens) - start)
        first = start // BLOCK_TOKENS
        full = count // BLOCK_TOKENS
        blocks = -(-count // BLOCK_TOKENS)
        metas.append(
            ChunkMeta.make(
                root=base,
                start_token=start,
                n_tokens=count,
                block_keys=keys[first : first + full],
                tail_key=tails[0] if blocks > full else None,
                layout=layout,
                tenant=tenant,
            )
        )
    return metas


def payload(meta: ChunkMeta) -> np.ndarray:
    """The bytes that belong to a chunk, derived from its id."""
    seed = int(meta.chunk_id[:8], 16)
    return np.random.default_rng(seed).integers(0, 256, meta.nbytes, dtype=np.uint8)
