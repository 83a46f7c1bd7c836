"""EncoderWorker: the Ray actor that owns a text encoder."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import ray

from serve_app.worker.birth import begin
from serve_app.worker.spec import WorkerSpec


@ray.remote(num_cpus=0, max_concurrency=4096)
class EncoderWorker:
    """Encodes token sequences of many callers in common batches; the model runs in a thread of its own."""

    def __init__(self, spec: WorkerSpec) -> None:
        progress = begin(spec)
        from serve_app.engine.encoder.batcher import EncodeBatcher
        from serve_app.worker.loading import prepare_torch, resolve_weights

        prepare_torch(spec)
        path = resolve_weights(spec, progress)
        progress("importing")
        from serve_app.models.encoder import Task, load_encoder

        task: Task = "reranker" if spec.stage == "reranker" else "embeddings"
        progress("loading weights")
        self._spec = spec
        self._model = load_encoder(path, task, dtype=spec.dtype, device=spec.device)
        self._batcher = EncodeBatcher(self._model, token_budget=spec.max_batch_tokens, name=spec.stage)
        self._batcher.submit([np.array([1, 2, 3], np.int32)]).result()
        progress("ready")

    async def encode(self, wire: dict[str, Any]) -> dict[str, Any]:
        """``{"ids", "lengths", "types"?, "pooling"?, "normalize"?, "dimensions"?, "heads"?}``, arrays as int32 bytes,
        all sequences one after the other -> ``{"shape", "data"}`` with float32 bytes (with ``heads`` ``{"sizes",
        "width", "data"}``, rows of their own lengths that begin with a vector of that width), or ``{"error"}`` for
        input that the model refuses."""
        from serve_app.engine.encoder.types import EncodeError

        lengths = np.frombuffer(wire["lengths"], np.int32)
        cuts = np.cumsum(lengths)[:-1]
        sequences = np.split(np.frombuffer(wire["ids"], np.int32), cuts)
        types = np.split(np.frombuffer(wire["types"], np.int32), cuts) if wire.get("types") else None
        readout = self._model.readout
        changes = {
            field: wire[name]
            for name, field in (("pooling", "pooling"), ("normalize", "normalise"), ("dimensions", "dimensions"))
            if wire.get(name) is not None
        }
        if wire.get("heads"):
            changes["heads"] = tuple(wire["heads"])
        try:
            future = self._batcher.submit(sequences, replace(readout, **changes), type_ids=types)
        except EncodeError as refused:
            return {"error": str(refused)}
        # Cancelling the await cancels the future, which frees the queue.
        rows = await asyncio.wrap_future(future)
        if isinstance(rows, list):
            sizes = np.array([len(row) for row in rows], np.int32).tobytes()
            return {"sizes": sizes, "width": self._model.dimensions, "data": np.concatenate(rows).tobytes()}
        return {"shape": list(rows.shape), "data": np.ascontiguousarray(rows, np.float32).tobytes()}

    async def info(self) -> dict[str, Any]:
        return {"max_length": self._model.max_length, "dimensions": self._model.dimensions, "pid": os.getpid()}

    async def stats(self) -> dict[str, Any]:
        return {"stage": self._spec.stage, **asdict(self._batcher.stats()), "pid": os.getpid()}
