"""What a predictor's worker does, without Ray: inputs of many callers in common batches."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec

from serve_app.catalog.tasks import folder_of
from serve_app.media.preparing import Full, Preparing
from serve_app.predict.batcher import PredictBatcher
from serve_app.predict.predictor import BadInput, Item, Place, Predictor
from serve_app.wire.generate import Failed
from serve_app.wire.predict import PredictCall, Predicted, PredictResult, ProgressCall, ProgressTold
from serve_app.wire.replicas import Counters, Pulse
from serve_app.worker.loading import Progress, prepare_torch, resolve_weights
from serve_app.worker.spec import WorkerSpec

# Inputs of one request that are prepared at the same time.
PREPARED = 4


class PredictWork:
    """The task's `worker.py` has the model; it runs in a thread of its own."""

    def __init__(self, spec: WorkerSpec, progress: Progress) -> None:
        prepare_torch(spec)
        task = importlib.import_module(f"{folder_of(spec.task)}.worker")
        # A task that needs what may not be installed has one.
        stand_in: Callable[[], Predictor | None] = getattr(task, "stand_in", lambda: None)
        predictor = stand_in()
        if predictor is None:
            path = resolve_weights(spec, progress)
            progress("loading weights")
            predictor = task.load(Place(path, spec.dtype, spec.device))
        self._stage = spec.stage
        self._predictor = predictor
        self._batcher = PredictBatcher(predictor, budget=spec.max_batch_tokens, name=spec.stage)
        self._preparing = Preparing()
        with ThreadPoolExecutor(1) as apart:  # this thread may have an event loop already
            example = PredictCall((predictor.example(),), json.dumps(predictor.example_options).encode())
            warm = apart.submit(asyncio.run, self.predict(example)).result()
        if isinstance(warm, Failed):
            raise RuntimeError(f"the model refuses the example of its task: {warm.error}")
        progress("ready")

    async def predict(self, call: PredictCall) -> PredictResult:
        """The results in the order of the inputs, or the reason for which one is refused."""
        options: dict[str, Any] = json.loads(call.options)
        places = asyncio.Semaphore(PREPARED)
        # Batches wait for others of their account no less than for other accounts.
        whose = call.salt + call.priority.encode()

        async def run(items: Sequence[Item]) -> list[Any]:
            # Cancelling the await cancels the future, which frees the queue.
            return await asyncio.wrap_future(self._batcher.submit(items, batch=call.priority == "batch"))

        async def one(data: bytes) -> tuple[bytes, dict[str, int]]:
            async with places:
                prepare = partial(_graceful, partial(self._predictor.prepare, data, options))
                item = await self._preparing.run(whose, len(data), prepare)
                result, units = await self._predictor.answer(item, run)
            return msgspec.json.encode(result), units

        asked = [asyncio.ensure_future(one(data)) for data in call.inputs]
        try:
            found = await asyncio.gather(*asked)
        except BadInput as refused:
            return Failed(str(refused), refused=True)
        except Full:
            return Failed("Too many files of your account wait to be read already; please try again.")
        finally:
            for task in asked:
                task.cancel()
        units: dict[str, int] = {}
        for _, used in found:
            for name, count in used.items():
                units[name] = units.get(name, 0) + count
        return Predicted(tuple(result for result, _ in found), units)

    def progress(self, call: ProgressCall) -> ProgressTold:
        """How far an input has come that is watched."""
        return ProgressTold(*self._predictor.progress(call.watch))

    def pulse(self) -> Pulse:
        """That this process is there, and how long its step has lasted."""
        return Pulse(os.getpid(), self._batcher.clock.seconds)

    def stats(self) -> Counters:
        return Counters(self._stage, os.getpid(), asdict(self._batcher.stats()))


def _graceful(prepare: Any) -> Item:
    """``prepare()`` without gradients, which each thread is asked for anew."""
    import torch

    with torch.no_grad():
        item: Item = prepare()
        return item
