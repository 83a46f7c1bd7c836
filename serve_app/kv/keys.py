"""Names of cached K/V: a sha256 chain over token ids that starts from everything else the numbers depend on.

::

    weights = H("weights" | model revision | dtype | layout)    each field length-prefixed
    root    = H("root"  | weights | adapter | tenant salt)        likewise
    key[0]  = H("block" | root     | tokens[0:32])
    key[i]  = H("block" | key[i-1] | tokens[32i:32i+32])
    state   = H("state" | key[i] or tail)       what layers keep of all tokens up to there
    tail    = H("tail"  | key[n-1] | count | tokens[32n:32n+count])                    1 <= count <= 31

Tokens of an image or of sound are placeholders, the same for all. A block or tail that such a span reaches into hashes
the span's digest as well, behind its tokens, with where the span lies beside it.

Equal keys therefore mean equal prefixes from token 0 on, for one model, one layout, one adapter and one
tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 32
CHUNK_TOKENS = 256

_WEIGHTS = b"serve_app.kv.weights.1"
_STATE = b"serve_app.kv.state.1"
_ROOT = b"serve_app.kv.root.2"
_TENANT = b"serve_app.kv.tenant.1"
_ALL = b"serve_app.kv.files.1"
# One byte each, so that no block can be taken for a tail, whatever the tokens are.
_BLOCK = b"\x01"
_TAIL = b"\x02"

TokenIds = NDArray[np.integer] | Sequence[int]
# (first token, end, digest of the content) of each span of placeholders, in order.
Media = Sequence[tuple[int, int, bytes]]


def weights_key(model_revision: str, dtype: str, layout: str) -> bytes:
    """What K/V depend on beside tokens, adapter and tenant. Workers tell it to gateways, whose keys are then theirs."""
    return _digest(_WEIGHTS, model_revision.encode(), dtype.encode(), layout.encode())


def root_key(weights: bytes, adapter: str, tenant_salt: bytes) -> bytes:
    """The start of a chain. ``adapter`` is empty for the base model; an empty ``tenant_salt`` is a
    ValueError.
    """
    if not tenant_salt:
        raise ValueError("tenant_salt must not be empty: it keeps one tenant from probing another's prompts")
    return _digest(_ROOT, weights, adapter.encode(), tenant_salt)


def tenant_id(tenant_salt: bytes) -> bytes:
    """What the pool knows of a tenant: enough to count its bytes, and no more."""
    return sha256(_TENANT + tenant_salt).digest()[:16]


def extended_root(root: bytes) -> bytes:
    """The root for texts whose positions are rotated as those of long ones."""
    return sha256(b"extended" + root).digest()


def state_key(key: bytes) -> bytes:
    """Names the states behind the tokens that end with the block or tail of ``key``."""
    return sha256(_STATE + key).digest()


def block_keys(root: bytes, token_ids: TokenIds, *, known: Sequence[bytes] = (), media: Media = ()) -> list[bytes]:
    """Keys of all full blocks of ``token_ids`` (1-D, int32 range): ``len(token_ids) // 32`` of them.

    ``known`` holds keys already computed for the same tokens, from the first block on; only the rest is
    hashed.
    """
    count = len(token_ids) // BLOCK_TOKENS
    keys = list(known[:count])
    if len(keys) == count:
        return keys
    first = len(keys) * BLOCK_TOKENS
    data = _token_bytes(token_ids[first : count * BLOCK_TOKENS])
    parent = keys[-1] if keys else root
    step = BLOCK_TOKENS * 4
    for at in range(0, len(data), step):
        inside = _media_bytes(media, first + at // 4, BLOCK_TOKENS) if media else b""
        parent = sha256(_BLOCK + parent + data[at : at + step] + inside).digest()
        keys.append(parent)
    return keys


def tail_key(parent: bytes, tail_tokens: TokenIds, *, media: Media = (), start: int = 0) -> bytes:
    """Key of a partial last block of 1 to 31 tokens behind ``parent``, the last full block's key (or the
    root). ``start`` is the tail's first token, which only ``media`` needs.
    """
    count = len(tail_tokens)
    if not 0 < count < BLOCK_TOKENS:
        raise ValueError(f"a tail has 1 to {BLOCK_TOKENS - 1} tokens, not {count}")
    inside = _media_bytes(media, start, count)
    return sha256(_TAIL + parent + bytes((count,)) + _token_bytes(tail_tokens) + inside).digest()


def _digest(label: bytes, *values: bytes) -> bytes:
    digest = sha256(label)
    for value in values:
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)
    return digest.digest()


def media_parts(digest: bytes, places: Sequence[tuple[int, int]], grid: tuple[int, int] | None = None) -> Media:
    """The runs of placeholders, (first token, count) each, that stand for one file: each has a name of its own, with
    its ``grid`` where positions follow from that."""
    found, at = [], 0
    laid = b"" if grid is None else b"".join(side.to_bytes(4, "little") for side in grid)
    for first, count in places:
        found.append((first, first + count, digest + at.to_bytes(4, "little") + laid))
        at += count
    return found


def all_over(digests: Iterable[bytes]) -> Media:
    """For a prompt all of whose K/V depend on all of its files: a name of these that reaches into its first block."""
    return [(0, 1, _digest(_ALL, *digests))]


def _media_bytes(media: Media, start: int, count: int) -> bytes:
    """Digests of the spans that reach into ``count`` tokens from ``start`` on, and where each begins against them."""
    parts = []
    for first, end, digest in media:
        if first < start + count and start < end:
            parts.append((first - start).to_bytes(8, "little", signed=True))
            parts.append(len(digest).to_bytes(2, "little") + digest)
    return b"".join(parts)


def _token_bytes(token_ids: TokenIds) -> bytes:
    array = np.asarray(token_ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"token ids must be 1-D integers, got {array.ndim}-D {array.dtype}")
    if array.dtype.itemsize >= 4 and array.dtype != np.int32:
        # A silent wrap would give two prompts one key.
        low, high = int(array.min()), int(array.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError("token ids must fit in int32")
    return array.astype("<i4", copy=False).tobytes()
