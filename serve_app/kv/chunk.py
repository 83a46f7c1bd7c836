"""One stored piece of K/V: up to 256 tokens over all layers, with what it takes to refuse a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS


class BadChunk(ValueError):
    """Metadata or payload that contradicts itself. Readers take it as a miss."""


@dataclass(slots=True, frozen=True)
class Layout:
    """What all chunks of one engine have in common: how keys and values lie in a payload, and a block's bytes.

    The pool knows no more of a payload than this; the engine's cache writes and reads it.
    """

    name: str
    block_bytes: int

    @classmethod
    def of(
        cls, layers: Sequence[tuple[int, ...]], dtype: str, item_bytes: int, rank: int = 0, ranks: int = 1
    ) -> Layout:
        """Of layers with (K/V heads, head size) each, which ``rank`` of ``ranks`` workers holds. A third number is that
        of parts: 2 for keys and values, 1 for what is both.
        """
        sized = [(heads, dim, *(more or [2])) for heads, dim, *more in layers]
        if not sized:  # layers with states alone
            return cls("none", 1)
        runs = [[*sized[0], 0]]
        for layer in sized:
            if runs[-1][:3] != [*layer]:
                runs.append([*layer, 0])
            runs[-1][3] += 1
        name = "+".join(f"L{count}.H{heads}.D{dim}" + ".S" * (parts == 1) for heads, dim, parts, count in runs)
        share = f".R{rank}of{ranks}" if ranks > 1 else ""
        token_bytes = sum(parts * heads * dim * item_bytes for heads, dim, parts in sized)
        return cls(f"{name}.B{BLOCK_TOKENS}.{dtype}{share}", BLOCK_TOKENS * token_bytes)

    @classmethod
    def of_states(cls, parts: Sequence[object], nbytes: int) -> Layout:
        """Of one text's states: a chunk of one block, whose key is theirs (:func:`serve_app.kv.keys.state_key`)."""
        return cls(f"states.{sha256(repr(parts).encode()).hexdigest()[:16]}", nbytes)

    def fits(self, piece: Piece) -> bool:
        """Whether a piece's payload has this layout and as many bytes as its blocks take."""
        return piece.layout == self.name and piece.nbytes == piece.chunk_blocks * self.block_bytes


@dataclass(slots=True, frozen=True)
class ChunkMeta:
    """Tokens [start_token, start_token + n_tokens) of one chain.

    The payload is a 1-D uint8 array of ``nbytes``, ``n_blocks`` blocks in the layout of that name. ``block_keys`` name
    the chunk's own full blocks; ``tail_key`` its partial last block, if there is one.
    """

    chunk_id: str
    root: bytes
    start_token: int
    n_tokens: int
    block_keys: tuple[bytes, ...]
    tail_key: bytes | None
    layout: str
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
        layout: Layout,
        tenant: bytes = b"",
    ) -> ChunkMeta:
        """Fills in the id and the size and checks the rest. Equal content has an equal id everywhere."""
        digest = sha256(b"serve_app.kv.chunk.2")
        digest.update(start_token.to_bytes(8, "little") + n_tokens.to_bytes(8, "little"))
        for key in (root, *block_keys[-1:], tail_key or b""):
            digest.update(len(key).to_bytes(2, "little") + key)
        digest.update(layout.name.encode())
        meta = cls(
            chunk_id=digest.hexdigest()[:40],
            root=root,
            start_token=start_token,
            n_tokens=n_tokens,
            block_keys=tuple(block_keys),
            tail_key=tail_key,
            layout=layout.name,
            nbytes=-(-n_tokens // BLOCK_TOKENS) * layout.block_bytes,
            tenant=tenant,
        )
        meta.check()
        return meta

    @property
    def start_block(self) -> int:
        return self.start_token // BLOCK_TOKENS

    @property
    def n_blocks(self) -> int:
        return -(-self.n_tokens // BLOCK_TOKENS)

    @property
    def end_token(self) -> int:
        return self.start_token + self.n_tokens

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All names this chunk can be found by: its blocks', then its tail's."""
        return self.block_keys if self.tail_key is None else (*self.block_keys, self.tail_key)

    def check(self) -> None:
        """Raises :class:`BadChunk` unless tokens, keys and size agree."""
        full, tail = divmod(self.n_tokens, BLOCK_TOKENS)
        if self.start_token < 0 or self.start_token % BLOCK_TOKENS:
            raise BadChunk(f"start_token {self.start_token} is not a multiple of {BLOCK_TOKENS}")
        if not 0 < self.n_tokens <= CHUNK_TOKENS:
            raise BadChunk(f"n_tokens {self.n_tokens} is not within 1..{CHUNK_TOKENS}")
        if len(self.block_keys) != full or (self.tail_key is not None) != bool(tail):
            raise BadChunk(f"{self.n_tokens} tokens do not go with {len(self.keys)} keys")
        if not isinstance(self.layout, str) or self.nbytes <= 0 or self.nbytes % self.n_blocks:
            raise BadChunk(f"{self.nbytes} bytes are not those of {self.n_blocks} blocks of {self.layout!r}")

    def to_fields(self) -> dict[str, Any]:
        """Its fields by name, plain values only (str, int, bytes, list)."""
        return {
            "chunk_id": self.chunk_id,
            "root": self.root,
            "start_token": self.start_token,
            "n_tokens": self.n_tokens,
            "block_keys": list(self.block_keys),
            "tail_key": self.tail_key,
            "layout": self.layout,
            "nbytes": self.nbytes,
            "tenant": self.tenant,
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ChunkMeta:
        """The inverse of :meth:`to_fields`; raises :class:`BadChunk` for what does not hold together."""
        try:
            meta = cls(**{**fields, "block_keys": tuple(fields["block_keys"])})
            meta.check()
        except BadChunk:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise BadChunk(f"not a chunk: {error}") from error
        return meta


@dataclass(slots=True, frozen=True)
class Piece:
    """The part of a stored chunk that a prompt can use.

    The payload holds ``chunk_blocks`` blocks from token ``chunk_start`` on, in the layout of that name and ``nbytes``
    long; those from ``first_block`` on, ``n_blocks`` of them, cover the prompt's tokens [start_token, start_token +
    n_tokens).
    """

    chunk_id: str
    chunk_start: int
    first_block: int
    n_blocks: int
    n_tokens: int
    layout: str
    chunk_blocks: int
    nbytes: int
    # Where it lay: in the node's pool ("node"), in its files ("disk") or in another node's pool ("remote").
    tier: str = "node"

    @property
    def start_token(self) -> int:
        return self.chunk_start + self.first_block * BLOCK_TOKENS

    @property
    def end_token(self) -> int:
        return self.start_token + self.n_tokens


def check_payload(payload: object, nbytes: int) -> NDArray[np.uint8]:
    """``payload`` itself. Raises :class:`BadChunk` when it is no contiguous flat uint8 array of ``nbytes``."""
    if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.ndim != 1:
        raise BadChunk("the payload is not a flat uint8 array")
    if not payload.flags.c_contiguous or payload.nbytes != nbytes:
        raise BadChunk(f"a payload of {payload.nbytes} bytes is not one of {nbytes}")
    return payload
