"""The order in which a batch is run: requests whose prompts begin alike follow each other, over the whole batch.

A prompt is known by digests of its beginnings: of its head (tools and the first message), and of its first 128 bytes,
256, 512 and so on up to 32 KiB or its end. Requests with equal digests up to some length stand together, and inside of
them those that are equal further on. Groups stand in the order in which the first of each came, so a batch that shares
nothing keeps its order. A request takes 40 bytes however long its prompt is.

Two beginnings that have the same digest by chance are mixed: that costs a little of what is shared, nothing else.
"""

from __future__ import annotations

import struct
from zlib import crc32

import numpy as np

# A block of K/V has 32 tokens, about 128 bytes of text: less is not shared.
BOUNDS: tuple[int, ...] = tuple(128 << i for i in range(9))
LEVELS = 1 + len(BOUNDS)
ROW = 4 * LEVELS
_PACK = [struct.Struct(f">{n}I{ROW - 4 * n}x") for n in range(LEVELS + 1)]
_SLICES = [slice(low, high) for low, high in zip((0, *BOUNDS[:-1]), BOUNDS, strict=True)]
NOTHING = bytes(ROW)


def digests(head: bytes, prompt: bytes) -> bytes:
    """``ROW`` bytes that tell how ``prompt`` begins. ``head``: the part of it that others are likeliest to share, b""
    for none.
    """
    found = [_digest(crc32(head)) if head else 0]
    crc, length = 0, len(prompt)
    for bound, part in zip(BOUNDS, _SLICES, strict=True):
        if bound > length:
            found.append(_digest(crc32(prompt[part], crc)) | 1)
            break
        crc = crc32(prompt[part], crc)
        found.append(_digest(crc))
    return _PACK[len(found)].pack(*found)


def _digest(crc: int) -> int:
    """Even, as odd ones are of whole prompts; never 0, which stands behind the end of a prompt."""
    return (crc & 0xFFFFFFFE) or 2


def levels(rows: bytes | bytearray) -> np.ndarray:
    """What :func:`digests` gave, one after another, as uint32 (requests, LEVELS)."""
    return np.frombuffer(rows, ">u4").reshape(-1, LEVELS)


def order(models: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Indices of the requests, int32, in the order in which to run them. ``models``: an integer for each; ``rows``: see
    :func:`levels`.
    """
    count = len(models)
    if not count:
        return np.zeros(0, np.int32)
    wide = np.ascontiguousarray(rows).view(">u8")
    found = np.lexsort([*(wide[:, i] for i in reversed(range(wide.shape[1]))), models]).astype(np.int32)
    begins = np.zeros(count, bool)
    begins[0] = True
    for column in (models, *(rows[:, i] for i in range(LEVELS))):
        found, begins = _by_first(found, begins, column)
        if begins.all():
            break
    return found


def _by_first(found: np.ndarray, begins: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits each group at the changes of ``column``, and orders its parts by the first request in each. ``begins``:
    where a group begins.
    """
    value = column[found]
    parts = begins.copy()
    parts[1:] |= value[1:] != value[:-1]
    del value
    starts = np.flatnonzero(parts).astype(np.int32)
    first = np.minimum.reduceat(found, starts)
    chosen = np.lexsort([first, np.cumsum(begins, dtype=np.int32)[starts]]).astype(np.int32)
    del first
    sizes = np.diff(starts, append=np.int32(len(found)))[chosen]
    before = np.cumsum(sizes, dtype=np.int32) - sizes
    moved = np.repeat(starts[chosen] - before, sizes)
    moved += np.arange(len(found), dtype=np.int32)
    parts[:] = False
    parts[before] = True
    return found[moved], parts


def shared(found: np.ndarray, models: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How many bytes of its prompt each request, in the order ``found``, is sure to share with the one before, int64:
    the longest bound up to which they are equal.
    """
    told = np.zeros(len(found), np.int64)
    if len(found) < 2:
        return told
    same = models[found[1:]] == models[found[:-1]]
    for i, bound in enumerate(BOUNDS, start=1):
        value = rows[found, i]
        same = same & (value[1:] == value[:-1]) & (value[1:] != 0) & (value[1:] % 2 == 0)
        if not same.any():
            break
        told[1:][same] = bound
    return told
