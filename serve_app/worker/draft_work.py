"""What a draft worker does, without Ray: continues sequences of several decode workers with a small model."""

from __future__ import annotations

import os

from serve_app.engine.blocks import BlockPool
from serve_app.engine.build import num_blocks
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftQuery
from serve_app.wire.draft import Proposals, ProposeCall
from serve_app.wire.replicas import Counters, Pulse
from serve_app.worker.draft_adapters import put_draft_adapters
from serve_app.worker.loading import Progress, limits_of, load_model, prepare_torch, resolve_weights
from serve_app.worker.spec import WorkerSpec


class DraftWork:
    """Calls are served one at a time."""

    def __init__(self, spec: WorkerSpec, progress: Progress) -> None:
        prepare_torch(spec)
        model = load_model(spec, resolve_weights(spec, progress), progress)
        limits = limits_of(spec, model)
        blocks = num_blocks(limits, model.kv_shape.block_bytes)
        self._engine = DraftEngine(
            Runner(model.forward, model.kv_shape.allocate(blocks, model.device)),
            BlockPool(blocks),
            max_batch_tokens=spec.max_batch_tokens,
            max_model_len=min(limits.max_model_len, model.max_model_len),
            places=put_draft_adapters(spec.draft_lora, spec.source, model),
        )
        self._proposals = 0
        progress("ready")

    def propose(self, call: ProposeCall) -> Proposals:
        """See :meth:`serve_app.engine.speculation.draft_engine.DraftEngine.propose`."""
        self._proposals += 1
        queries = [DraftQuery(q.id, q.agreed, q.suffix, q.adapter) for q in call.queries]
        return Proposals(self._engine.propose(queries, call.count, list(call.over)))

    def pulse(self) -> Pulse:
        """That this process is there; asked between two calls."""
        return Pulse(os.getpid())

    def stats(self) -> Counters:
        return Counters("draft", os.getpid(), {"sequences": self._engine.sequences, "proposals": self._proposals})
