"""Decode: a request's home. Has long prompts computed by Prefill, then generates, drafts verified on the way."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deployments.blueprint import Blueprint
from deployments.draft import Draft
from deployments.prefill import Prefill
from deployments.root import Text
from deployments.stage import EngineStage
from deployments.worker import WorkerHandle
from serve_app.catalog.records import DraftModel, Lora, ModelRecord
from serve_app.wire.replicas import AllCounters, Counters, read_counters
from serve_app.worker.spec import WorkerSpec

log = logging.getLogger("ray.serve")

# How long to wait for the draft worker's name before a health check begins anew.
DRAFT_WAIT_S = 120.0
# A stage that is loading has no counters to show.
STATS_TIMEOUT_S = 1.5
# Adapters that a worker on a GPU has there at most, unless the record says otherwise.
GPU_PLACES = 32


@serve.deployment(name="Decode")
class Decode(EngineStage):
    stage = "decode"

    async def __init__(  # type: ignore[misc]
        self,
        spec: WorkerSpec,
        prefill: DeploymentHandle | None = None,
        draft: DeploymentHandle | None = None,
        num_gpus: float = 0,
        min_remote_prefill_tokens: int = 64,
    ) -> None:
        EngineStage.__init__(self)
        # Whoever is chosen to prefill, with a prefill stage or without.
        self._min_remote = max(1, min_remote_prefill_tokens)
        self._prefill = prefill
        self._draft = draft
        if prefill is not None:
            self.role = "decode"
            self.prefill_elsewhere(prefill)
        await self.start_worker(spec, num_gpus)

    async def greet(self, worker: Any) -> None:
        await super().greet(worker)
        self._connect_soon(worker)

    async def check_health(self) -> None:
        needed = await self.supervisor.check(lambda worker: WorkerHandle(worker).needs_draft())
        if needed and self._connecting.done():
            self.supervisor.tell(self._connect_soon)

    def _connect_soon(self, worker: Any) -> None:
        """In the background: neither decoding nor a health check waits for the draft model to load."""
        self._connecting = asyncio.ensure_future(self._connect_draft(worker))

    async def _connect_draft(self, worker: Any) -> None:
        if self._draft is None:
            return
        try:
            await worker.use_draft.remote(await asyncio.wait_for(self._draft_name(), DRAFT_WAIT_S))
        except Exception as error:  # decoding goes on without drafts; the next health check tries again
            log.warning("no draft worker for now (%s)", type(error).__name__)

    async def _draft_name(self) -> str:
        return await self._draft.worker_name.remote()  # type: ignore[union-attr]

    async def all_stats(self, call: bytes) -> bytes:
        """Counters of this replica's worker and of all prefill and draft ones."""
        others = [_stats_of(stage) for stage in (self._prefill, self._draft) if stage is not None]
        own, told = await asyncio.gather(self.supervisor.counters(self.stage), asyncio.gather(*others))
        return AllCounters((own, *(worker for stage in told for worker in stage))).encode()


async def _stats_of(stage: DeploymentHandle) -> list[Counters]:
    try:
        told = await asyncio.wait_for(stage.broadcast("stats").results_async(), STATS_TIMEOUT_S)
        return [read_counters(counters) for counters in told]
    except Exception as error:  # a stage that is restarting has nothing to tell
        log.info("no counters from %s (%s)", stage.deployment_name, type(error).__name__)
        return [Counters(stage.deployment_name.lower())]


def application(model: Blueprint) -> Application:
    """A text model's deployments: the root, Decode, and Prefill and Draft where the profile has them."""
    stages, workers = model.stages, engine_specs(model)
    prefill = draft = None
    if "prefill" in workers:
        prefill = model.routed(Prefill, "prefill").bind(workers["prefill"], model.gpus("prefill"))
    if "draft" in stages and (drafting := _drafting(model.record)) is not None:
        own = _draft_lora(model.record)
        spec = model.spec("draft", weights=drafting.weights.model_dump(), draft_lora=own, adapters=len(own))
        draft = model.sized(Draft, "draft").bind(spec, model.gpus("draft"))
    decode = model.routed(Decode, "decode").bind(
        workers["decode"], prefill, draft, model.gpus("decode"), model.profile.min_remote_prefill_tokens
    )
    return Text.bind(decode)  # type: ignore[attr-defined]


def engine_specs(model: Blueprint) -> dict[str, WorkerSpec]:
    """What the model's engine workers are told, by stage."""
    record, stages = model.record, model.stages
    own = _own_draft(record, "decode")
    said, drafting = record.speculation, _drafting(record)
    drafts = min(drafting.tokens, said.tokens) if drafting is not None and ("draft" in stages or own) else 0
    proposers = {"speculate_tokens": said.tokens, "ngram": said.ngram, "recent": said.recent, "draft_tokens": drafts}
    both: dict[str, Any] = {
        "publish": True,
        "quantization": record.quantization,
        "kv_cache_dtype": record.kv_cache_dtype,
    }
    if record.adapters is not None:
        both |= {
            "files": model.settings.files or str(model.settings.home / "files"),
            "adapter_cache_bytes": record.adapters.cache_bytes or model.settings.lora_cache_bytes,
        }
    options: dict[str, dict[str, Any]] = {
        "decode": {**both, **proposers, **own},
        "prefill": {**both, **_own_draft(record, "prefill")},
    }
    specs = {stage: model.spec(stage, **told) for stage, told in options.items() if stage in stages}
    return {stage: _with_places(spec, record.adapters) for stage, spec in specs.items()}


def _with_places(spec: WorkerSpec, lora: Lora | None) -> WorkerSpec:
    """With as many adapters at a time as there may be requests, where the record does not say how many."""
    if lora is None:
        return spec
    places = lora.places or (spec.max_num_seqs if spec.device == "cpu" else min(spec.max_num_seqs, GPU_PLACES))
    return replace(spec, adapters=places)


def _drafting(record: ModelRecord) -> DraftModel | None:
    """The record's draft, unless its speculation leaves it out."""
    return record.draft if record.speculation.draft and record.speculation.tokens else None


def _own_draft(record: ModelRecord, stage: str) -> dict[str, Any]:
    """What a worker is told that drafts for itself; prefill has to know an EAGLE-3 head, whose K/V are in the cache."""
    if record.draft is None or not record.draft.in_worker:
        return {}
    method = "eagle3" if record.draft.method == "eagle3" else "colocated"
    if stage == "prefill" and method != "eagle3":
        return {}
    weights = record.draft.weights.model_dump()
    return {"draft_method": method, "draft_weights": weights, "draft_lora": _draft_lora(record)}


def _draft_lora(record: ModelRecord) -> dict[str, str]:
    """The directory of the draft's adapter for each of the model's own that has one."""
    if record.draft is None or record.adapters is None:
        return {}
    return {record.adapters.public[name]: path for name, path in record.draft.lora.items()}
