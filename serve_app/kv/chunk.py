"""One stored piece of K/V: up to 256 tokens over all layers, with what it takes to refuse a wrong one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS

# By name, since numpy has neither bfloat16 nor float8.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class BadChunk(ValueError):
    """Metadata or payload that contradicts itself. Readers take it as a miss."""


@dataclass(slots=True, frozen=True)
class Layout:
    """What all chunks of one engine have in common."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def name(self) -> str:
        """For ``layout`` of :func:`serve_app.kv.keys.root_key`."""
        return f"L{self.layers}.H{self.kv_heads}.D{self.head_dim}.B{BLOCK_TOKENS}"

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def fits(self, shape: Sequence[int], dtype: str) -> bool:
        layers, two, _, heads, block, dim = shape
        mine = (self.layers, 2, self.kv_heads, BLOCK_TOKENS, self.head_dim, self.dtype)
        return (layers, two, heads, block, dim, dtype) == mine


@dataclass(slots=True, frozen=True)
class ChunkMeta:
    """Tokens [start_token, start_token + n_tokens) of one chain.

    The payload is a 1-D uint8 array: the bytes of a contiguous ``shape`` = [L, 2, n_blocks, Hkv, 32, D] of
    ``dtype``. ``block_keys`` name the chunk's own full blocks; ``tail_key`` its partial last block, if
    there is one.
    """

    chunk_id: str
    root: bytes
    start_token: int
    n_tokens: int
    block_keys: tuple[bytes, ...]
    tail_key: bytes | None
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    # Whose it is (:func:`serve_app.kv.keys.tenant_id`), for sharing space out. The id names it through the root.
    tenant: bytes = b""

    @classmethod
    def make(
        cls,
        *,
        root: bytes,
        start_token: int,
        n_tokens: int,
        block_keys: Sequence[bytes],
        tail_key: bytes | None,
        shape: Sequence[int],
        dtype: str,
        tenant: bytes = b"",
    ) -> ChunkMeta:
        """Fills in the id and the size and checks the rest. Equal content has an equal id everywhere."""
        if dtype not in ITEM_BYTES:
            raise BadChunk(f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
        digest = sha256(b"serve_app.kv.chunk.1")
        digest.update(start_token.to_bytes(8, "little") + n_tokens.to_bytes(8, "little"))
        for key in (root, *block_keys[-1:], tail_key or b""):
            digest.update(len(key).to_bytes(2, "little") + key)
        digest.update(f"{tuple(shape)} {dtype}".encode())
        meta = cls(
            chunk_id=digest.hexdigest()[:40],
            root=root,
            start_token=start_token,
            n_tokens=n_tokens,
            block_keys=tuple(block_keys),
            tail_key=tail_key,
            shape=tuple(int(n) for n in shape),
            dtype=dtype,
            nbytes=math.prod(shape) * ITEM_BYTES[dtype],
            tenant=tenant,
        )
        meta.check()
        return meta

    @property
    def start_block(self) -> int:
        return self.start_token // BLOCK_TOKENS

    @property
    def end_token(self) -> int:
        return self.start_token + self.n_tokens

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All names this chunk can be found by: its blocks', then its tail's."""
        return self.block_keys if self.tail_key is None else (*self.block_keys, self.tail_key)

    def check(self) -> None:
        """Raises :class:`BadChunk` unless tokens, keys, shape and size agree."""
        full, tail = divmod(self.n_tokens, BLOCK_TOKENS)
        if self.start_token < 0 or self.start_token % BLOCK_TOKENS:
            raise BadChunk(f"start_token {self.start_token} is not a multiple of {BLOCK_TOKENS}")
        if not 0 < self.n_tokens <= CHUNK_TOKENS:
            raise BadChunk(f"n_tokens {self.n_tokens} is not within 1..{CHUNK_TOKENS}")
        if len(self.block_keys) != full or (self.tail_key is not None) != bool(tail):
            raise BadChunk(f"{self.n_tokens} tokens do not go with {len(self.keys)} keys")
        if len(self.shape) != 6 or min(self.shape) < 1 or self.shape[1] != 2 or self.shape[4] != BLOCK_TOKENS:
            raise BadChunk(f"shape {self.shape} is not [L, 2, n_blocks, Hkv, {BLOCK_TOKENS}, D]")
        if self.shape[2] != full + bool(tail):
            raise BadChunk(f"{self.shape[2]} blocks do not go with {self.n_tokens} tokens")
        if self.nbytes != math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0):
            raise BadChunk(f"{self.nbytes} bytes do not go with {self.shape} of {self.dtype}")

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values (str, int, bytes, list)."""
        return {
            "chunk_id": self.chunk_id,
            "root": self.root,
            "start_token": self.start_token,
            "n_tokens": self.n_tokens,
            "block_keys": list(self.block_keys),
            "tail_key": self.tail_key,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "nbytes": self.nbytes,
            "tenant": self.tenant,
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> ChunkMeta:
        """The inverse of :meth:`to_wire`; raises :class:`BadChunk` for what does not hold together."""
        try:
            fields = {**wire, "block_keys": tuple(wire["block_keys"]), "shape": tuple(wire["shape"])}
            meta = cls(**fields)
            meta.check()
        except BadChunk:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise BadChunk(f"not a chunk: {error}") from error
        return meta


@dataclass(slots=True, frozen=True)
class Piece:
    """The part of a stored chunk that a prompt can use.

    The payload holds blocks of ``shape`` from token ``chunk_start`` on; those from ``first_block`` on,
    ``n_blocks`` of them, cover the prompt's tokens [start_token, start_token + n_tokens).
    """

    chunk_id: str
    chunk_start: int
    first_block: int
    n_blocks: int
    n_tokens: int
    shape: tuple[int, ...]
    dtype: str
    # Where it lay: in the node's pool ("node"), in its files ("disk") or in another node's pool ("remote").
    tier: str = "node"

    @property
    def start_token(self) -> int:
        return self.chunk_start + self.first_block * BLOCK_TOKENS

    @property
    def end_token(self) -> int:
        return self.start_token + self.n_tokens

    @property
    def nbytes(self) -> int:
        """Size of the whole chunk's payload, of which the piece is a part."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def payload_view(shape: Sequence[int], dtype: str, payload: object) -> NDArray[np.uint8]:
    """``payload`` as uint8 [L, 2, n_blocks, Hkv, 32, D * item size], without a copy.

    Raises :class:`BadChunk` when it is no contiguous uint8 array of just the right length.
    """
    if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.ndim != 1:
        raise BadChunk("the payload is not a flat uint8 array")
    if not payload.flags.c_contiguous or payload.nbytes != math.prod(shape) * ITEM_BYTES.get(dtype, 0):
        raise BadChunk(f"a payload of {payload.nbytes} bytes does not go with {tuple(shape)} of {dtype}")
    return payload.reshape(*shape[:-1], shape[-1] * ITEM_BYTES[dtype])
