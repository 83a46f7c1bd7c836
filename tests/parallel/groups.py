"""Groups of ranks for tests: rank 0 in this process, the others forked from one that has imported torch once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serve_app.engine.kv_io.transfer import ChunkExporter, LoadedPiece, StoredPrefix
from serve_app.kv.chunk import ChunkMeta
from serve_app.models.load import CausalModel
from serve_app.parallel.link import LinkAddress
from serve_app.parallel.meeting import leave
from serve_app.worker.follower import run_rank
from serve_app.worker.loading import load_model
from serve_app.worker.ranks import Ranks, begin_ranks, load_together
from serve_app.worker.spec import WorkerSpec
from tests import tiny

# Of this session, which removes its folder before this process would.
multiprocessing.current_process()._config["tempdir"] = tempfile.mkdtemp(prefix="fork-")  # type: ignore[attr-defined]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["serve_app.worker.loading", "tests.parallel.groups", "torch.distributed.tensor"])


def spec_of(path: Path, tensor: int = 1, pipeline: int = 1, **more: Any) -> WorkerSpec:
    return WorkerSpec(
        "@cf/tests/divided", "decode", {"path": str(path)}, "", str(path.parent), cpu_threads=1, tensor_parallel=tensor,
        pipeline_parallel=pipeline, **more,
    )  # fmt: skip


def child(spec: WorkerSpec, rank: int, address: LinkAddress) -> None:
    with contextlib.suppress(Exception):  # rank 0 is told
        run_rank(spec, rank, address, lambda step: None)
    os._exit(0)


def start(spec: WorkerSpec, rank: int, address: LinkAddress) -> Any:
    process = CONTEXT.Process(target=child, args=(spec, rank, address), daemon=True)
    process.start()
    return process


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


def computed(model: CausalModel, prompt: list[int]) -> StoredPrefix:
    """A prompt's K/V, and the states behind it where layers keep some, as the pool has them."""
    chunks: list[tuple[ChunkMeta, np.ndarray]] = []
    engine = tiny.make_engine(model, num_blocks=40)
    engine.exporter = ChunkExporter(
        engine.runner.kv, lambda _, meta, copy: chunks.append((meta, copy())), engine.scheduler.states.slot_of
    )
    engine.add(tiny.make_request("give", prompt, prefill_only=True), held=0)
    tiny.run_all(engine)
    pieces, states = [], []
    for meta, payload in chunks:
        assert payload.nbytes == meta.nbytes
        if meta.layout.startswith("states"):
            states.append(torch.from_numpy(payload))
        else:
            pieces.append(LoadedPiece(meta.start_token, meta.n_tokens, torch.from_numpy(payload)))
    return StoredPrefix(pieces, state=states[-1], stop=len(prompt)) if states else StoredPrefix(pieces)
