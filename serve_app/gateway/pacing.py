"""What a gateway's core knows of its models' workers, as the pace of batches goes by it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from serve_app.batch.pace import ModelState, Pace, Ramp, WorkerState
from serve_app.routing.types import WorkerLoad

if TYPE_CHECKING:
    from serve_app.gateway.core import Gateway
    from serve_app.gateway.dispatch.dispatcher import Dispatcher
    from serve_app.tasks.model import ServedModel


def pace_of(core: Gateway) -> Pace:
    """The pace of a runner whose requests go through ``core``."""

    def ask(name: str, ramp: Ramp) -> None:
        model = core.models.get(name)
        if model is not None and core.engine.serves(model):
            core.engine.dispatcher(model).policy.workers.batch_needed = ramp.replicas

    pace = Pace(
        lambda: {model.id: _state(core, model, pace.share(model.id)) for model in core.models},
        ask,
        cores=os.cpu_count() or 1,
    )
    return pace


def _state(core: Gateway, model: ServedModel, share: float) -> ModelState:
    stages = model.profile.stages
    first = stages[model.first_stage]
    on_cores = not any(stage.num_gpus for stage in stages.values())
    if not core.engine.serves(model):
        # More of them at once would ask for more replicas; half of that is for others.
        calls = max(1, int(first.target_ongoing_requests * max(1, first.min_replicas) / 2))
        return ModelState((), on_cores, model.scales_to_zero and not model.ready, calls)
    dispatcher = core.engine.dispatcher(model)
    loads = dispatcher.policy.workers.loads
    workers = [_worker(dispatcher, load, share) for load in loads if load.stage != "prefill"] or [
        _worker(dispatcher, load, share) for load in loads
    ]
    return ModelState(workers, on_cores, model.scales_to_zero and not loads)


def _worker(dispatcher: Dispatcher, load: WorkerLoad, share: float) -> WorkerState:
    realtime = load.running + load.waiting
    # Prompts computed for another worker's streams are work of others as well.
    if not realtime and load.queued_prefill_tokens:
        realtime = 1
    costs = dispatcher.policy.costs
    step = costs.decode_seconds(realtime, load.kv_tokens_used)
    rows = int(share / (1.0 - share) * step / max(costs.d1, 1e-9)) if realtime else 0
    return WorkerState(load.node, load.max_seqs, realtime, rows)
