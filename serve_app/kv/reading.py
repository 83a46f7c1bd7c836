"""How chunks' objects are read: each on its own, so that one that is lost takes no other along."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError

from serve_app.kv.chunk import BadChunk, ChunkMeta, Piece, check_payload
from serve_app.kv.export import ExportBuffer
from serve_app.kv.parts import Parted, Payload, block_bytes, together
from serve_app.wire.parts import Part

log = logging.getLogger(__name__)

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


class ElsewhereFailed(RuntimeError):
    """Another process of the worker could not read a chunk, which may well be good."""


class ObjectReader:
    """Reads into this process. ``needs``: whether it wants a part; ``fits``: whether parts are of its model."""

    def __init__(
        self,
        needs: Callable[[Part], bool] = lambda part: True,
        fits: Callable[[tuple[Part, ...]], bool] = lambda parts: True,
    ) -> None:
        self._needs, self._fits = needs, fits

    async def read(self, values: Sequence[Value], deadline: float) -> list[Read | BaseException]:
        timeout_s = max(0.05, deadline - time.monotonic())
        return await asyncio.gather(*(self._one(value, timeout_s) for value in values), return_exceptions=True)

    async def _one(self, value: Value, timeout_s: float) -> Read:
        if not isinstance(value, Parted):
            return await within(value, timeout_s)
        if not self._fits(value.parts):
            raise BadChunk(f"parts of another model: {value.parts}")
        wanted = needed(value, self._needs)
        arrays = await asyncio.gather(*(within(ref, timeout_s) for ref in wanted.refs))
        return Payload(wanted.parts, tuple(arrays))


def needed(value: Parted, needs: Callable[[Part], bool]) -> Parted:
    """The same with those parts alone that somebody wants."""
    pairs = [pair for pair in zip(value.parts, value.refs, strict=True) if needs(pair[0])]
    return Parted(tuple(part for part, _ in pairs), tuple(ref for _, ref in pairs))


def is_lost(error: BaseException) -> bool:
    """Whether the object itself is gone, for whoever reads it."""
    return isinstance(error, ObjectLostError)


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
    for at, part in enumerate(parts):
        if part.away:  # a node's pool counts what lies on its node
            refs[at] = await asyncio.to_thread(ray.put, payloads[at])
    return Parted(parts, tuple(refs))


async def put_together(
    metas: Sequence[ChunkMeta], others: Sequence[Any], parts: tuple[Part, ...], buffer: ExportBuffer
) -> bool:
    """Makes whole chunks of the first parts, which wait in ``buffer``, and those that ``others`` export. False: one of
    them failed.
    """
    try:
        for meta in metas:
            own = buffer.take(meta.chunk_id)
            more = await asyncio.gather(*(one.export_chunk.remote(meta.chunk_id) for one in others))
            whole = await asyncio.to_thread(together, parts, [own, *more], meta.n_blocks)
            buffer.put(meta.chunk_id, whole)
    except Exception as error:
        log.info("chunks could not be put together: %r", error)
        return False
    return True


def moved(found: Sequence[tuple[Piece, Read]], pieces: Sequence[Piece], payloads: Sequence[Any]) -> int:
    """Bytes that a read has brought, and the one more chunk of which it at most had the greater part when it was given
    up: that a link is too slow is learnt as well.
    """
    late = next((p for p, payload in zip(pieces, payloads, strict=True) if isinstance(payload, TimeoutError)), None)
    return sum(piece.nbytes for piece, _ in found) + (late.nbytes if late is not None else 0)
