"""EngineWorker: the Ray actor around an engine. Prefill and decode run the same class."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray

from deployments.planted import Planted
from deployments.rank_worker import host_for_ranks, start_rank
from serve_app.ray_private.zones import node_zone
from serve_app.wire.decide import DecideCall, DecideResult, read_decide_call, read_decide_result
from serve_app.wire.generate import (
    ArrivingCall,
    CollectCall,
    Collected,
    GenerateCall,
    GenerateResult,
    PrefillCall,
    Prefilled,
    PrefillResult,
    read_arriving_call,
    read_collect_call,
    read_collected,
    read_generate_call,
    read_generate_many,
    read_generate_result,
    read_prefill_call,
    read_prefill_result,
    read_prefilled,
)
from serve_app.wire.replicas import Counters, Listen, read_counters, read_listen
from serve_app.worker.birth import begin
from serve_app.worker.spec import WorkerSpec


@ray.remote(num_cpus=0, max_concurrency=4096)
class EngineWorker:
    """Loads a model and runs requests on it until its replica goes. Takes and returns encoded messages; the work is
    :class:`serve_app.worker.engine_work.EngineWork`.
    """

    def __init__(self, spec: WorkerSpec, planted: Planted | None = None) -> None:
        progress = begin(spec)
        self._spec = spec
        self._planted = planted
        if planted is not None:
            planted.wait()
        from serve_app.worker.start import start_engine_work

        context = ray.get_runtime_context()
        self._work = start_engine_work(
            spec,
            progress,
            node_id=context.get_node_id(),
            worker_id=context.get_actor_id(),
            exporter=lambda: ray.get_runtime_context().current_actor,
            start_rank=lambda rank, address: start_rank(spec, rank, address),
            host=host_for_ranks(spec),
            zone=node_zone(),
        )

    async def adopt(self, spec: WorkerSpec, pid: int) -> bool:
        """A replica takes a planted worker over (:mod:`deployments.nursery`); False if it is not for it to have."""
        return self._planted is not None and spec == self._spec and self._planted.take(pid)

    async def ready(self) -> int:
        """Ends once the model is loaded; this process's id."""
        return os.getpid()

    async def generate(self, call: bytes) -> bytes:
        return (await self._work.generate(read_generate_call(call))).encode()

    async def generate_many(self, call: bytes, replica: str) -> bytes:
        return (await self._work.generate_many(read_generate_many(call), replica)).encode()

    async def arriving(self, call: bytes) -> bytes:
        return (await self._work.arriving(read_arriving_call(call))).encode()

    async def prefilled(self, told: bytes) -> None:
        await self._work.prefilled(read_prefilled(told))

    async def prefill(self, call: bytes) -> bytes:
        return (await self._work.prefill(read_prefill_call(call))).encode()

    async def decide(self, call: bytes) -> bytes:
        return (await self._work.decide(read_decide_call(call))).encode()

    async def collect(self, call: bytes) -> bytes:
        return (await self._work.collect(read_collect_call(call))).encode()

    async def abort(self, request_id: str) -> None:
        await self._work.abort(request_id)

    async def subscribe(self, call: bytes) -> None:
        await self._work.subscribe(read_listen(call))

    async def use_draft(self, name: str) -> None:
        """Names the actor that drafts for this worker from now on."""
        from deployments.draft_worker import draft_worker

        self._work.draft.connect(await asyncio.to_thread(draft_worker, name))

    async def export_chunk(self, chunk_id: str) -> Any:
        return self._work.export_chunk(chunk_id)

    async def stats(self) -> bytes:
        return self._work.stats().encode()

    async def pulse(self) -> bytes:
        """For :class:`deployments.supervisor.Supervisor`."""
        return self._work.pulse().encode()

    async def needs_draft(self) -> bool:
        """For health checks; see :meth:`serve_app.worker.engine_work.EngineWork.needs_draft`."""
        return self._work.needs_draft()


class WorkerHandle:
    """Calls an :class:`EngineWorker` with messages."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def ready(self) -> None:
        await self.actor.ready.remote()

    async def generate(self, call: GenerateCall) -> GenerateResult:
        return read_generate_result(await self.actor.generate.remote(call.encode()))

    async def generate_many(self, call: bytes, replica: str) -> bytes:
        """Nothing between gateway and worker looks into it."""
        return await self.actor.generate_many.remote(call, replica)

    async def arriving(self, call: ArrivingCall) -> GenerateResult:
        return read_generate_result(await self.actor.arriving.remote(call.encode()))

    async def prefilled(self, told: Prefilled) -> None:
        await self.actor.prefilled.remote(told.encode())

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        return read_prefill_result(await self.actor.prefill.remote(call.encode()))

    async def decide(self, call: DecideCall) -> DecideResult:
        return read_decide_result(await self.actor.decide.remote(call.encode()))

    async def collect(self, call: CollectCall) -> Collected:
        return read_collected(await self.actor.collect.remote(call.encode()))

    async def abort(self, request_id: str) -> None:
        await self.actor.abort.remote(request_id)

    async def subscribe(self, call: Listen) -> None:
        await self.actor.subscribe.remote(call.encode())

    async def stats(self) -> Counters:
        return read_counters(await self.actor.stats.remote())

    async def needs_draft(self) -> bool:
        return await self.actor.needs_draft.remote()
