"""How chunks' objects are read: each on its own, so that one that is lost takes no other along."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from serve_app.kv.chunk import ChunkMeta, check_payload
from serve_app.kv.export import ExportBuffer
from serve_app.kv.parts import Parted, Payload, block_bytes, together
from serve_app.wire.parts import Part

T = TypeVar("T")
# What the pool gave: a reference, or one for each part; and what that is once it has been read.
Value = Any
Read = NDArray[np.uint8] | Payload


class Reader(Protocol):
    """Reads what a pool's look-up gave."""

    async def read(self, values: Sequence[Value], deadline: float) -> list[Read | BaseException]:
        """A payload for each, or in its place the exception that reading it raised. ``deadline``: by
        ``time.monotonic``.
        """
        ...


class ObjectReader:
    """Reads into this process. ``needs``: whether it wants a part."""

    def __init__(self, needs: Callable[[Part], bool] = lambda part: True) -> None:
        self._needs = needs

    async def read(self, values: Sequence[Value], deadline: float) -> list[Read | BaseException]:
        timeout_s = max(0.05, deadline - time.monotonic())
        return await asyncio.gather(*(self._one(value, timeout_s) for value in values), return_exceptions=True)

    async def _one(self, value: Value, timeout_s: float) -> Read:
        if not isinstance(value, Parted):
            return await within(value, timeout_s)
        wanted = [pair for pair in zip(value.parts, value.refs, strict=True) if self._needs(pair[0])]
        arrays = await asyncio.gather(*(within(ref, timeout_s) for _, ref in wanted))
        return Payload(tuple(part for part, _ in wanted), tuple(arrays))


async def within(ref: Awaitable[T], timeout_s: float) -> T:
    async def value() -> T:
        return await ref

    return await asyncio.wait_for(value(), max(0.001, timeout_s))


async def pulled(exporters: Sequence[Any], meta: ChunkMeta, parts: tuple[Part, ...]) -> Any:
    """What keeps the chunk: a reference, or one for each of ``parts``. Raises whatever happens at the exporters, and
    :class:`BadChunk`.
    """
    refs = [exporter.export_chunk.remote(meta.chunk_id) for exporter in exporters]
    payloads = await asyncio.gather(*refs)
    if not parts:
        check_payload(payloads[0], meta.nbytes)
        return refs[0]
    for part, payload in zip(parts, payloads, strict=True):
        check_payload(payload, meta.n_blocks * block_bytes(part))
    # A node's pool counts what lies on its node.
    kept = (ray.put(payload) if part.away else ref for part, ref, payload in zip(parts, refs, payloads, strict=True))
    return Parted(parts, tuple(kept))


async def put_together(
    metas: Sequence[ChunkMeta], others: Sequence[Any], parts: tuple[Part, ...], buffer: ExportBuffer
) -> None:
    """Makes whole chunks of the first parts, which wait in ``buffer``, and those that ``others`` export."""
    for meta in metas:
        own = buffer.take(meta.chunk_id)
        more = await asyncio.gather(*(one.export_chunk.remote(meta.chunk_id) for one in others))
        buffer.put(meta.chunk_id, together(parts, [own, *more], meta.n_blocks))
