"""What an encoder worker does, without Ray: encodes sequences of many callers in common batches."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.engine.encoder.types import EncodeError
from serve_app.models.encoders.encoder import Task
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.wire.encode import EncodeCall, Encoded, EncodedTokens, EncodeResult
from serve_app.wire.generate import Failed
from serve_app.wire.replicas import Counters, Pulse
from serve_app.worker.loading import Progress, prepare_torch, resolve_weights
from serve_app.worker.spec import WorkerSpec


class EncoderWork:
    """The model runs in a thread of its own."""

    def __init__(self, spec: WorkerSpec, progress: Progress) -> None:
        prepare_torch(spec)
        path = resolve_weights(spec, progress)
        task: Task = "reranker" if spec.stage == "reranker" else "embeddings"
        progress("loading weights")
        self._stage = spec.stage
        self._model = load_encoder(path, task, dtype=spec.dtype, device=spec.device, remember=True)
        self._batcher = EncodeBatcher(self._model, token_budget=spec.max_batch_tokens, name=spec.stage)
        self._batcher.submit([np.array([1, 2, 3], np.int32)]).result()
        progress("ready")

    async def encode(self, call: EncodeCall) -> EncodeResult:
        """Rows in the order of the sequences, or the reason for which the model refuses them."""
        lengths = np.frombuffer(call.lengths, np.int32)
        cuts = np.cumsum(lengths)[:-1]
        sequences = np.split(np.frombuffer(call.ids, np.int32), cuts)
        types = np.split(np.frombuffer(call.types, np.int32), cuts) if call.types else None
        asked = {"pooling": call.pooling, "normalise": call.normalize, "dimensions": call.dimensions}
        changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        if call.heads:
            changes["heads"] = call.heads
        if call.raw:
            changes["sigmoid"] = False
        try:
            readout, batch = replace(self._model.readout, **changes), call.priority == "batch"
            future = self._batcher.submit(sequences, readout, type_ids=types, batch=batch)
        except EncodeError as refused:
            return Failed(str(refused), refused=True)
        # Cancelling the await cancels the future, which frees the queue.
        rows = await asyncio.wrap_future(future)
        if isinstance(rows, list):
            sizes = np.array([len(row) for row in rows], np.int32).tobytes()
            return EncodedTokens(sizes, self._model.dimensions, _bytes(np.concatenate(rows)))
        return Encoded(rows.shape, _bytes(rows))

    def pulse(self) -> Pulse:
        """That this process is there, and how long its step has lasted."""
        return Pulse(os.getpid(), self._batcher.clock.seconds)

    def stats(self) -> Counters:
        return Counters(self._stage, os.getpid(), asdict(self._batcher.stats()))


def _bytes(rows: np.ndarray) -> memoryview:
    return np.ascontiguousarray(rows, np.float32).reshape(-1).data.cast("B")
