"""Groups of ranks for tests: rank 0 in this process, the others forked from one that has imported torch once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serve_app.engine.blocks import blocks_for
from serve_app.engine.kv_io.transfer import ChunkExporter, LoadedPiece, StoredPrefix
from serve_app.engine.parted import held_whole, needs, part_of
from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.parts import check_parts, run_views, together
from serve_app.kv.reading import ObjectReader
from serve_app.models.load import CausalModel
from serve_app.parallel.cache import GroupShape
from serve_app.parallel.link import LinkAddress
from serve_app.parallel.meeting import leave
from serve_app.parallel.shelf import Shelf
from serve_app.worker.follower import run_rank
from serve_app.worker.loading import load_model
from serve_app.worker.rank_store import RankReader, hold
from serve_app.worker.ranks import Ranks, begin_ranks, load_together
from serve_app.worker.spec import WorkerSpec
from tests import tiny
from tests.worker.world import Ready

# Of this session, which removes its folder before this process would.
multiprocessing.current_process()._config["tempdir"] = tempfile.mkdtemp(prefix="fork-")  # type: ignore[attr-defined]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["serve_app.worker.loading", "tests.parallel.groups", "torch.distributed.tensor"])


def spec_of(path: Path, tensor: int = 1, pipeline: int = 1, **more: Any) -> WorkerSpec:
    return WorkerSpec(
        "@cf/tests/divided", "decode", {"path": str(path)}, "", str(path.parent), cpu_threads=1, tensor_parallel=tensor,
        pipeline_parallel=pipeline, **more,
    )  # fmt: skip


def child(spec: WorkerSpec, rank: int, address: LinkAddress, line: Any = None) -> None:
    shelf = Shelf(spec.export_bytes)
    if line is not None:
        threading.Thread(target=_answer, args=(line, shelf), daemon=True).start()
    with contextlib.suppress(Exception):  # rank 0 is told
        run_rank(spec, rank, address, lambda step: None, shelf)
    os._exit(0)


def _answer(line: Any, shelf: Shelf) -> None:
    """What a rank's actor does (``deployments/rank_worker.py``)."""
    calls = {
        "export_chunk": shelf.take, "forget": shelf.forget, "hold": lambda *told: asyncio.run(hold(shelf, *told))
    }  # fmt: skip
    with contextlib.suppress(EOFError):
        while True:
            name, told = line.recv()
            try:
                line.send((calls[name](*told), None))
            except Exception as error:
                line.send((None, error))


class RankProcess:
    """A rank's process, asked as its actor is: ``hold.remote(...)``, ``export_chunk.remote(...)``."""

    def __init__(self, process: Any, line: Any) -> None:
        self.process, self._line, self._lock = process, line, threading.Lock()
        names = "hold", "export_chunk", "forget"
        self.hold, self.export_chunk, self.forget = (Method(partial(self.ask, name)) for name in names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)

    def ask(self, name: str, *told: Any) -> Any:
        with self._lock:
            self._line.send((name, told))
            found, error = self._line.recv()
        if error is not None:
            raise error
        return found


@dataclass
class Method:
    ask: Callable[..., Any]

    def remote(self, *told: Any) -> Awaitable[Any]:
        return asyncio.to_thread(self.ask, *told)


def start(spec: WorkerSpec, rank: int, address: LinkAddress, context: Any = CONTEXT, main: Any = child) -> RankProcess:
    here, there = context.Pipe()
    process = context.Process(target=main, args=(spec, rank, address, there), daemon=True)
    process.start()
    there.close()
    return RankProcess(process, here)


@dataclass
class Running:
    """A model on several ranks, and how it was lost."""

    model: CausalModel
    ranks: Ranks
    lost: list[str] = field(default_factory=list)


@contextlib.contextmanager
def divided(
    path: Path, tensor: int = 1, pipeline: int = 1, *, end: Callable[[str], None] | None = None, **more: Any
) -> Iterator[Running]:
    """The model in ``path`` on ``tensor`` times ``pipeline`` ranks. ``end``: what a lost rank comes to."""
    lost: list[str] = []
    spec = spec_of(path, tensor, pipeline, **more)
    ranks = begin_ranks(
        spec, lambda rank, address: start(spec, rank, address), "127.0.0.1", lambda step: None, end=end or lost.append
    )
    try:
        model = load_together(ranks, lambda: load_model(spec, path, lambda step: None, ranks.group))
        yield Running(model, ranks, lost)
    finally:
        ranks.close()
        leave()
        for process in ranks.handles:
            process.join(30)
            assert not process.is_alive(), "a rank outlives rank 0"


def until(true: Any, seconds: float = 60.0) -> None:
    """Waits for a condition, and fails where it does not come true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def whole_chunk(model: CausalModel, meta: ChunkMeta, own: np.ndarray) -> np.ndarray:
    """A chunk of which a worker's rank 0 exports ``own``."""
    shape = model.kv_shape
    if not isinstance(shape, GroupShape) or meta.layout != shape.layout.name:
        return own
    parts = shape.published()
    others = [shape.handles[rank - 1].ask("export_chunk", meta.chunk_id) for rank in parts if rank]
    found = together(tuple(parts.values()), [own, *others], meta.n_blocks)
    check_parts(tuple(parts.values()), meta.nbytes // meta.n_blocks)
    return found


def layers_of(model: CausalModel, payload: np.ndarray, tokens: int) -> list[torch.Tensor]:
    """Each layer's float32 [sides, Hkv, tokens, D] of a whole chunk: of tokens alone, since a block may have been
    another's before.
    """
    runs = run_views(part_of(held_whole(model.kv_shape)), payload, blocks_for(tokens))
    layers: dict[int, torch.Tensor] = {}
    for run, view in runs:
        for at in range(run.layers):
            x = torch.from_numpy(view[at].copy()).view(torch.float32)
            layers[run.layer + at] = x.transpose(1, 2).flatten(2, 3)[:, :, :tokens]
    return [layers[at] for at in sorted(layers)]


def chunks_of(model: CausalModel, engine: Any, *prompts: list[int]) -> list[tuple[ChunkMeta, np.ndarray]]:
    """What an engine gives the pool of prompts, every chunk whole."""
    given: list[tuple[ChunkMeta, Callable[[], np.ndarray]]] = []
    engine.exporter = ChunkExporter(
        engine.runner.kv, lambda _, meta, copy: given.append((meta, copy)), engine.scheduler.states.slot_of
    )
    for index, prompt in enumerate(prompts):
        engine.add(tiny.make_request(f"give {index}", prompt, prefill_only=True), held=0)
    tiny.run_all(engine)
    # The last first: in whatever order somebody asks.
    found = [(meta, whole_chunk(model, meta, copy())) for meta, copy in reversed(given)][::-1]
    assert all(payload.nbytes == meta.nbytes for meta, payload in found)
    return found


def computed(model: CausalModel, prompt: list[int]) -> StoredPrefix:
    """A prompt's K/V, and the states behind it where layers keep some, as the pool has them."""
    pieces, states = [], []
    for meta, payload in chunks_of(model, tiny.make_engine(model, num_blocks=40), prompt):
        if meta.layout.startswith("states"):
            states.append(torch.from_numpy(payload))
        else:
            pieces.append(LoadedPiece(meta.start_token, meta.n_tokens, torch.from_numpy(payload)))
    return StoredPrefix(pieces, state=states[-1], stop=len(prompt)) if states else StoredPrefix(pieces)


def read_by(model: CausalModel, prefix: StoredPrefix) -> StoredPrefix:
    """The same as the ranks of ``model`` have read it, if it has several."""
    shape = model.kv_shape
    if not isinstance(shape, GroupShape):
        return prefix
    runs = [part.runs() for part in shape.parts]
    others = [(actor, partial(needs, of_it)) for actor, of_it in zip(shape.handles, runs[1:], strict=True) if of_it]
    reader = RankReader(others, ObjectReader(partial(needs, runs[0])), lambda gone: None)
    values = [Ready(piece.payload.numpy()) for piece in prefix.pieces]
    found = asyncio.run(reader.read(values, time.monotonic() + 30))
    pieces = [dataclasses.replace(piece, payload=read) for piece, read in zip(prefix.pieces, found, strict=True)]
    return dataclasses.replace(prefix, pieces=pieces)
