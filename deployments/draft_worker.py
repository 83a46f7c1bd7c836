"""The draft model's actor."""

from __future__ import annotations

import os
from typing import Any

import ray

from serve_app.worker.birth import begin
from serve_app.worker.spec import WorkerSpec


@ray.remote(num_cpus=0)
class DraftWorker:
    """Continues sequences of several decode workers with a small model; calls are served one at a time."""

    def __init__(self, spec: WorkerSpec) -> None:
        progress = begin(spec)
        from serve_app.engine.blocks import BlockPool
        from serve_app.engine.build import num_blocks
        from serve_app.engine.runner import Runner
        from serve_app.engine.speculation.draft_engine import DraftEngine
        from serve_app.worker.loading import limits_of, load_model, prepare_torch, resolve_weights

        prepare_torch(spec)
        model = load_model(spec, resolve_weights(spec, progress), progress)
        limits = limits_of(spec, model)
        blocks = num_blocks(limits, model.kv_shape.block_bytes)
        self._engine = DraftEngine(
            Runner(model.forward, model.kv_shape.allocate(blocks, model.device)),
            BlockPool(blocks),
            max_batch_tokens=spec.max_batch_tokens,
            max_model_len=min(limits.max_model_len, model.max_model_len),
        )
        self._proposals = 0
        progress("ready")

    def propose(
        self, queries: list[tuple[str, int, list[int]]], count: int, over: list[str]
    ) -> dict[str, list[int] | None]:
        """See ``serve_app/engine/speculation/draft_engine.py``; queries are (id, agreed, suffix)."""
        from serve_app.engine.speculation.draft_proposer import DraftQuery

        self._proposals += 1
        return self._engine.propose([DraftQuery(*q) for q in queries], count, over)

    def stats(self) -> dict[str, Any]:
        return {"stage": "draft", "sequences": self._engine.sequences, "proposals": self._proposals, "pid": os.getpid()}
