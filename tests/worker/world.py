"""Workers without Ray: real engines and channels in this process, and a pool that is a dictionary of chunks."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.channel.inbox import TokenInbox
from serve_app.kv.chunk import ChunkMeta, Layout
from serve_app.kv.client import ClientStats, Fetched
from serve_app.kv.costs import FetchCosts
from serve_app.kv.export import ExportBuffer
from serve_app.kv.index import ChunkIndex
from serve_app.kv.news import PoolNews
from serve_app.kv.parts import Parted, check_read
from serve_app.kv.reading import ObjectReader, Reader
from serve_app.sampling_params import SamplingParams
from serve_app.wire.generate import AdapterAt, GenerateCall, Generated, GenerateResult, PrefillCall
from serve_app.wire.parts import Part
from serve_app.wire.tokens import TokenItem
from serve_app.worker.draft_link import DraftLink
from serve_app.worker.engine_work import EngineWork
from serve_app.worker.kv_publish import Publisher
from serve_app.worker.loading import load_engine
from serve_app.worker.spec import WorkerSpec

SALT = b"one tenant's salt, which nobody can guess"
_numbers = itertools.count()


@dataclass(frozen=True)
class Ready:
    """In the place of a reference to an object."""

    value: np.ndarray

    def __await__(self) -> Generator[None, None, np.ndarray]:
        yield from asyncio.sleep(0).__await__()
        return self.value


class MemoryPool:
    """Stands in for a node's pool and for the clients of it (:class:`serve_app.kv.client.KVClient`)."""

    def __init__(self) -> None:
        self.stats = ClientStats()
        self.costs = FetchCosts()
        self.announced: set[bytes] = set()
        self.reading_tokens = 0
        self.away = False
        self.chunks = ChunkIndex(1 << 30)
        self._changed = asyncio.Event()

    async def news(self, since: int, wait_s: float) -> PoolNews:
        if since >= 0:
            await asyncio.sleep(wait_s)
        return PoolNews("memory", 1 << 30, 0, [])

    def tokens(self, nbytes: int) -> int:
        return nbytes

    async def announce(self, keys: Sequence[bytes], ttl_s: float = 30.0) -> None:
        self.announced.update(keys)

    async def withdraw(self, keys: Sequence[bytes]) -> None:
        self.announced.difference_update(keys)

    async def publish(
        self, metas: Sequence[ChunkMeta], exporter: Any, buffer: ExportBuffer, others: Sequence[Any] = (),
        parts: tuple[Part, ...] = (),
    ) -> list[str]:  # fmt: skip
        for meta in metas:
            own = Ready(buffer.take(meta.chunk_id))
            more = [Ready(await other.export_chunk.remote(meta.chunk_id)) for other in others]
            if self.chunks.reserve(meta) is not None:
                self.chunks.commit(meta, Parted(parts, (own, *more)) if parts else own)
        self._changed.set()
        return [meta.chunk_id for meta in metas]

    async def touch(self, keys: Sequence[bytes], tail_keys: Sequence[bytes] = ()) -> int | None:
        pieces = self.chunks.match(keys, tail_keys)
        return pieces[-1].end_token if pieces else 0

    async def fetch(
        self, keys: Sequence[bytes], tail_keys: Sequence[bytes] = (), skip_tokens: int = 0, *, wait_s: float = 0.0,
        first: bool = False, from_node: str | None = None, reader: Reader = ObjectReader(),  # noqa: B008
    ) -> list[Fetched]:  # fmt: skip
        found = self.chunks.match(keys, tail_keys, skip_tokens // 32)
        if not found and wait_s:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                return []
            found = self.chunks.match(keys, tail_keys, skip_tokens // 32)
        values = [self.chunks.value(piece.chunk_id) for piece in found]
        read = await reader.read(values, time.monotonic() + 30.0)
        for piece, payload in zip(found, read, strict=True):
            if isinstance(payload, BaseException):
                raise payload
            check_read(payload, piece.nbytes, piece.chunk_blocks)
        return list(zip(found, read, strict=True))


class Client:
    """One worker's client of a pool, which reads in its own way."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self.reader: Reader = ObjectReader()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def fetch(self, *told: Any, **more: Any) -> list[Fetched]:
        return await self._pool.fetch(*told, **more, reader=self.reader)


def start(
    path: Path, stage: str, pool: MemoryPool, *, begin: Callable[[WorkerSpec], Any] | None = None, **options: Any
) -> EngineWork:
    """A worker of the model in ``path``, to be closed with ``await work.aclose()``; ``begin`` starts other ranks."""
    spec = WorkerSpec("tiny", stage, {"path": str(path)}, str(path), str(path.parent), dtype="float32", cpu_threads=1,
                      publish=True, **options)  # fmt: skip

    def publish(layout: Layout, of_states: Layout | None) -> Publisher:
        states: Any = None if of_states is None else Client(pool)
        client: Any = Client(pool)
        return Publisher(client, ExportBuffer(spec.export_bytes), lambda: None, states)

    draft = DraftLink()
    others = None if begin is None else lambda: begin(spec)
    loaded = load_engine(spec, lambda step: None, publish=publish, draft=draft, begin=others)
    return EngineWork(spec, loaded, draft, node_id="this node", worker_id=f"worker-{next(_numbers)}")


def call(
    ids: list[int], inbox: TokenInbox | None = None, *, prefill_above: int | None = None,
    adapter: AdapterAt | None = None, **sampling: Any,
):  # fmt: skip
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling})
    name, prompt = f"request-{next(_numbers)}", np.array(ids, np.int32).tobytes()
    address = inbox.address if inbox is not None else None
    return GenerateCall(name, prompt, SALT, params, address, prefill_above=prefill_above, adapter=adapter)


def prefill_call(ids: list[int], adapter: AdapterAt | None = None) -> PrefillCall:
    """All of ``ids`` but the last."""
    return PrefillCall(f"prefill-{next(_numbers)}", np.array(ids[:-1], np.int32).tobytes(), SALT, adapter=adapter)


async def read(inbox: TokenInbox, request: GenerateCall, answer: Callable[[], Any]) -> tuple[list[int], GenerateResult]:
    """The tokens and the result of a request, as a gateway puts them together."""
    items, result = await read_items(inbox, request, answer)
    return [token for item in items for token in item.ids], result


async def read_items(
    inbox: TokenInbox, request: GenerateCall, answer: Callable[[], Any]
) -> tuple[list[TokenItem], GenerateResult]:
    """The same with the tokens as they came. A short answer may be over before the channel stands: its tokens come with
    the result then.
    """
    stream = inbox.open_stream(request.id, request.resumed)

    async def items() -> list[TokenItem]:
        return [item async for item in stream]

    reading = asyncio.ensure_future(items())
    try:
        result = await answer()
        if not isinstance(result, Generated):
            return [], result
        for item in result.undelivered:
            stream.feed(item)
        return await reading, result
    finally:
        reading.cancel()
        inbox.close_stream(request.id)
