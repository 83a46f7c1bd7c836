"""Which prompts another cluster has cached of those that were passed to it.

Keys of cached prefixes are hashes that begin with a secret of the tenant (:mod:`serve_app.kv.keys`). For a request that
is passed this secret is made of two things: the account that the serving cluster knows the other one by, and a tag that
the sender derives from its own secret of the tenant. So both clusters can compute the keys of what was passed, nobody
else can, and what is passed shares no K/V with anything else there.

The serving cluster tells the first four bytes of such keys, of what its caches hold: of the asking cluster's own
requests and of nobody else's.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from serve_app.kv.keys import BLOCK_TOKENS, block_keys, root_key

# Of one cluster and model: about half a million tokens at 256 a key, told in 8 KB.
MAX_KEYS = 2048
# Clusters times models that are remembered.
MAX_PAIRS = 256
SHORT = 4


def tenant_tag(salt: bytes, neighbour: str) -> bytes:
    """What stands for a tenant, whose own secret is ``salt``, in one other cluster."""
    return hmac.new(salt, b"serve_app.neighbours.tag.1" + neighbour.encode(), sha256).digest()


def passed_salt(account: str, tag: bytes) -> bytes:
    """The secret of a passed request's tenant, in the cluster that knows the sender as ``account``."""
    named = account.encode()
    return sha256(b"serve_app.neighbours.salt.1" + len(named).to_bytes(2, "little") + named + tag).digest()


def chunk_keys(weights: bytes, salt: bytes, ids: NDArray[np.int32], chunk_tokens: int) -> list[bytes]:
    """Keys of the prompt's whole chunks."""
    per_key = max(chunk_tokens // BLOCK_TOKENS, 1)
    return block_keys(root_key(weights, "", salt), ids)[per_key - 1 :: per_key]


def cached_tokens(short: frozenset[bytes], keys: Sequence[bytes], chunk_tokens: int) -> int:
    """Of a prompt with these ``keys``, where those of ``short`` are held."""
    held = 0
    for key in keys:
        if key[:SHORT] not in short:
            break
        held += 1
    return held * chunk_tokens


def split(cached: bytes) -> frozenset[bytes]:
    return frozenset(cached[at : at + SHORT] for at in range(0, len(cached) - SHORT + 1, SHORT))


class Prefixes:
    """Keys of prompts that other clusters have passed here, by account and model, the latest last."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[str, str], OrderedDict[bytes, None]] = OrderedDict()

    def add(self, account: str, model: str, keys: Sequence[bytes]) -> None:
        pair = (account, model)
        kept = self._keys.setdefault(pair, OrderedDict())
        self._keys.move_to_end(pair)
        # The first chunk last: without it the others are worth nothing.
        for key in reversed(keys[:MAX_KEYS]):
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > MAX_KEYS:
            kept.popitem(last=False)
        while len(self._keys) > MAX_PAIRS:
            self._keys.popitem(last=False)

    def told(self, account: str, model: str, held: Callable[[Sequence[bytes]], NDArray[np.bool_]]) -> bytes:
        """Of what this account has passed, the short forms of the keys that ``held`` says caches have."""
        keys = list(self._keys.get((account, model), ()))
        if not keys:
            return b""
        return b"".join(key[:SHORT] for key, there in zip(keys, held(keys).tolist(), strict=True) if there)
