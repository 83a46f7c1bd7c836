"""EngineWorker: the Ray actor that owns a device, an engine and its thread. Prefill and decode run the same class."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from deployments.nursery import Claim
from serve_app.channel.frames import InboxAddress
from serve_app.channel.served import gateway_name
from serve_app.worker.birth import begin
from serve_app.worker.draft_link import DraftLink
from serve_app.worker.spec import WorkerSpec

# How long a gateway may be out of reach before its requests are given up.
INBOX_GRACE_S = 10.0


# How long a gateway that has to ask for tokens waits for the first, and what it gets at once.
COLLECT_WAIT_S = 1.0
COLLECT_PERIOD_S = 0.05


@dataclass(slots=True)
class Running:
    """One request in this worker: what to tell its caller at the end, and where its tokens go meanwhile."""

    done: asyncio.Future
    stream: str | None = None
    cached: int | None = None
    prompt: int = 0
    tokens: int = 0
    # How a prefill that goes on elsewhere has ended, where this request waits for one.
    prefilled: asyncio.Future | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    # For whom this is computed: gateway, tenant's id, class. None: a prefill, which decode counts.
    caller: tuple[str, str, str] | None = None


@ray.remote(num_cpus=0, max_concurrency=4096)
class EngineWorker:
    """Loads a model and runs requests on it until its replica goes.

    Everything asynchronous (calls, pool, token frames) happens on the actor's event loop; the engine has a thread of
    its own and speaks to the loop once per step.
    """

    def __init__(self, spec: WorkerSpec, claim: Claim | None = None) -> None:
        progress = begin(spec)
        self._claim = claim
        if claim is not None:
            claim.wait()
        self.spec = spec
        self._requests: dict[str, Running] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draft = DraftLink()
        self._load(spec, progress)

    def _load(self, spec: WorkerSpec, progress: Callable[[str], None]) -> None:
        from serve_app.worker.loading import load_engine

        self._model, self._engine, self._root_of = load_engine(spec, progress, emit=self._emit, draft=self._draft)
        from serve_app.channel.sender import TokenSender
        from serve_app.engine.loop import EngineLoop
        from serve_app.kv.client import KVClient
        from serve_app.kv.export import ExportBuffer
        from serve_app.kv.pool import get_or_create_pool
        from serve_app.worker.kv_link import PoolLink
        from serve_app.worker.load_report import WorkerLoad

        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        client = KVClient(self._node_id, self._model.kv_shape.layout, _pool_options(spec))
        self._pool = PoolLink(client, ExportBuffer(spec.export_bytes))
        # Started with the worker, or the first request would wait for it.
        get_or_create_pool(self._node_id, _pool_options(spec))
        self._sender = TokenSender(context.get_actor_id(), on_lost=self._inbox_lost, on_closed=self._abort_soon)
        self._load_told = WorkerLoad(
            spec.model, spec.stage, self._node_id, self._engine, self._sender, self._pool.fetches
        )
        self._engine_loop = EngineLoop(self._engine, self._on_outputs, name=f"{spec.stage}-engine")
        self._pool.attach(self._engine, self._engine_loop)
        progress("ready")

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def adopt(self, spec: WorkerSpec, pid: int) -> bool:
        """A replica takes a planted worker over (:mod:`deployments.nursery`); False if it is not for it to have."""
        return self._claim is not None and spec == self.spec and self._claim.take(pid)

    async def info(self) -> dict[str, Any]:
        """Facts about the loaded model that the replica's other calls and the log need."""
        scheduler = self._engine.scheduler
        return {
            "max_model_len": scheduler.max_model_len,
            "kv_blocks": scheduler.blocks.num_blocks - 1,
            "report": self._model.report,
            "actor_id": ray.get_runtime_context().get_actor_id(),
            "pid": os.getpid(),
        }

    async def subscribe(self, wire: dict[str, Any]) -> None:
        """See :meth:`serve_app.worker.load_report.WorkerLoad.subscribe`."""
        self._load_told.subscribe(wire)

    async def use_draft(self, name: str) -> None:
        """Names the actor that drafts for this worker from now on."""
        await asyncio.get_running_loop().run_in_executor(None, self._draft.connect, name)

    async def generate(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Runs one request to its end; tokens go to ``wire["inbox"]`` as they come.

        ``wire``: ``id``, ``ids`` (prompt, then ``resumed`` tokens generated before; int32 bytes), ``salt``,
        ``sampling``, ``inbox``. Returns ``{"finish", "cached", "undelivered", "path"}`` (see
        :meth:`serve_app.worker.kv_link.Path.to_wire`) or ``{"error", "refused"}``.

        Returns ``{"missing", "cached"}`` instead if a prefill worker should compute what neither this engine nor the
        pool holds (``wire["prefill_above"]`` tokens or more). Called again with that ``cached`` and ``arriving``, it
        takes over what prefill computes meanwhile, until :meth:`prefilled` says that it has ended.
        """
        request, running = self._register(wire, prefill_only=False)
        try:
            if (refused := await self._compile(request)) is not None:
                return {"error": refused, "refused": True}
            if running.prefilled is not None:
                stored = await self._pool.arriving(request, running.prefilled)
            else:
                stored = await self._pool.stored(request)
            missing = len(request.tokens) - 1 - stored.covered
            if "prefill_above" in wire and missing >= wire["prefill_above"]:
                return {"missing": missing, "cached": stored.covered}
            if running.done.done():
                return await running.done
            if running.prefilled is not None:
                # What prefill found stored as well was not computed for this request either.
                told = running.prefilled.result() if running.prefilled.done() else {}
                running.cached = max(wire["cached"], told.get("cached", 0))
            if "inbox" in wire:
                running.stream = request.id
                address = InboxAddress.from_wire(wire["inbox"])
                running.caller = gateway_name(address), request.tenant.hex(), wire.get("priority", "realtime")
                self._sender.open(request.id, address, request.resumed)
            self._engine_loop.add(request, stored.prefix, held=stored.held)
            self._load_told.changed()
            result = await running.done
            # Whatever the gateway has not acknowledged goes along, so that the answer never depends on the channel.
            cached = result.get("cached") or 0
            result["path"] = self._pool.done(request, stored, cached, running.first_token_s)
            result["undelivered"] = [item.to_wire() for item in self._sender.undelivered(request.id)]
            return result
        finally:
            self._sender.close(request.id)
            self._forget(request.id)

    async def collect(self, wire: dict[str, Any]) -> list[list[Any]]:
        """For a gateway that the token channel does not reach: the tokens of request ``wire["id"]`` from
        ``wire["offset"]`` on, as many as have come up, and what it says it has is forgotten. Waits a moment for the
        first; empty where there is no such request.
        """
        self._sender.acknowledged([[wire["id"], wire["offset"], False]])
        until = time.monotonic() + COLLECT_WAIT_S
        while wire["id"] in self._requests and time.monotonic() < until:
            await asyncio.sleep(COLLECT_PERIOD_S)
            if items := self._sender.undelivered(wire["id"]):
                return [item.to_wire() for item in items]
        return []

    async def prefilled(self, request_id: str, told: dict[str, Any]) -> bool:
        """Says how the prefill that a request waits for has ended: what :meth:`prefill` returned, or ``{}``. False if
        no such request is here (yet).
        """
        running = self._requests.get(request_id)
        if running is None or running.prefilled is None:
            return False
        if not running.prefilled.done():
            running.prefilled.set_result(told)
        return True

    async def prefill(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Computes and publishes the K/V of ``wire["ids"]``; returns ``{"finish", "cached", "node"}`` once the pool of
        that node holds them.
        """
        request, running = self._register(wire, prefill_only=True)
        try:
            self._pool.awaited.add(request.id)
            stored = await self._pool.stored(request)
            self._engine_loop.add(request, stored.prefix, held=stored.held)
            self._load_told.changed()
            result = await running.done
            await self._pool.published(request.id)
            return {**result, "node": self._node_id}
        finally:
            self._pool.awaited.discard(request.id)
            self._forget(request.id)

    async def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks; it is no error if it is gone already."""
        running = self._requests.get(request_id)
        self._engine_loop.abort(request_id)
        if running is not None and not running.done.done():
            running.done.set_result({"error": "aborted", "refused": False})
            if running.prefilled is not None and not running.prefilled.done():
                running.prefilled.set_result({})

    async def export_chunk(self, chunk_id: str) -> np.ndarray:
        """A published chunk's bytes, for the pool, which then owns the object."""
        return self._pool.exports.take(chunk_id)

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges of this worker."""
        engine, scheduler = self._engine, self._engine.scheduler
        return {
            "stage": self.spec.stage,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "used_blocks": scheduler.blocks.used_blocks,
            "cached_blocks": scheduler.blocks.cached_blocks,
            "total_blocks": scheduler.blocks.num_blocks - 1,
            "preemptions": scheduler.preemptions,
            "steps": engine.stats.steps,
            "prompt_tokens": engine.stats.prompt_tokens,
            "cached_tokens": engine.stats.cached_tokens,
            "generated_tokens": engine.stats.generated_tokens,
            "busy_seconds": round(engine.stats.busy_seconds, 3),
            "speculation": engine.speculation.stats() if engine.speculation is not None else None,
            "draft_connected": self._draft.connected,
            "pool": self._pool.stats(),
            "pid": os.getpid(),
        }

    async def check(self) -> dict[str, bool]:
        """Raises if the engine's thread has ended; says whether the draft model is wanted but out of reach."""
        if self._engine_loop.failed is not None:
            raise RuntimeError("the engine has stopped") from self._engine_loop.failed
        wanted = self.spec.draft_tokens > 0 and self.spec.draft_method == "deployment"
        return {"needs_draft": wanted and not self._draft.connected}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _register(self, wire: dict[str, Any], *, prefill_only: bool) -> tuple[Any, Running]:
        from serve_app.engine.request import Request, SamplingParams
        from serve_app.kv.keys import tenant_id

        self._loop = asyncio.get_running_loop()
        ids = np.frombuffer(wire["ids"], np.int32).tolist()
        sampling = SamplingParams() if prefill_only else SamplingParams.from_wire(wire["sampling"])
        resumed = wire.get("resumed", 0)
        request = Request(
            wire["id"],
            ids,
            len(ids) - resumed,
            sampling,
            self._root_of(wire["salt"]),
            resumed=resumed,
            prefill_only=prefill_only,
            tenant=tenant_id(wire["salt"]),
        )
        running = Running(self._loop.create_future(), prompt=len(ids))
        if wire.get("arriving"):
            running.prefilled = self._loop.create_future()
        self._requests[request.id] = running
        return request, running

    def _forget(self, request_id: str) -> None:
        """Ends what nobody waits for any more: a call may be cancelled here without :meth:`abort` ever arriving."""
        running = self._requests.pop(request_id, None)
        if running is not None and not running.done.done():
            self._engine_loop.abort(request_id)

    async def _compile(self, request: Any) -> str | None:
        """Gives a request its grammar, beside the event loop; the reason where that is impossible."""
        masks = self._engine.runner.masks
        if masks is None or request.sampling.grammar is None:
            return None
        try:
            await asyncio.to_thread(masks.compile, request)
        except ValueError as error:
            return f"its grammar can't be used: {error}"
        return None

    def _emit(self, request_id: str, meta: Any, copy: Callable[[], np.ndarray]) -> None:
        self._pool.emit(request_id, meta, copy)

    def _on_outputs(self, outputs: list) -> None:
        # Engine's thread. One wake-up of the event loop per step, whatever the batch size.
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list) -> None:
        from serve_app.channel.frames import TokenItem

        items = []
        for output in outputs:
            running = self._requests.get(output.request_id)
            if running is None or running.done.done():
                continue
            # What was found for it, as far as this engine has come to use it.
            running.cached = output.cached if running.cached is None else min(running.cached, output.cached)
            first = running.tokens == 0
            if running.caller is not None:
                cached = running.cached if first else 0
                uncached = max(running.prompt - cached, 0) if first else 0
                new = len(output.token_ids)
                self._load_told.served.add(*running.caller, uncached=uncached, cached=cached, output=new)
            if first:
                running.first_token_s = time.perf_counter() - running.started
            running.tokens += len(output.token_ids)
            if output.error is not None:
                running.done.set_result({"error": output.error, "refused": output.finish_reason == "refused"})
                continue
            if running.stream is not None:
                extra = _extra(output, running.cached if first else None)
                items.append(
                    TokenItem(output.request_id, output.offset, tuple(output.token_ids), output.finish_reason, extra)
                )
            if output.finish_reason is not None:
                running.done.set_result({"finish": output.finish_reason, "cached": running.cached})
        if items:
            self._sender.send(items)

    def _abort_soon(self, request_id: str) -> None:
        asyncio.ensure_future(self.abort(request_id))

    def _inbox_lost(self, address: Any, request_ids: list[str]) -> None:
        """A gateway that does not come back has no readers: give its requests' places to others."""

        def give_up() -> None:
            if not self._sender.connected(address):
                for request_id in request_ids:
                    self._abort_soon(request_id)

        asyncio.get_running_loop().call_later(INBOX_GRACE_S, give_up)


def _pool_options(spec: WorkerSpec) -> Any:
    from serve_app.kv.pool import PoolOptions

    return PoolOptions(
        use_directory=spec.several_nodes,
        disk_directory=spec.kv_disk_dir or os.path.join(spec.home, "kv"),
        disk_bytes=spec.kv_disk_bytes,
        guaranteed=spec.kv_guaranteed,
    )


def _extra(output: Any, cached: int | None) -> list[Any] | None:
    """What goes with each token: its log-probabilities, and with a request's first token how much was cached."""
    if output.logprobs is None and cached is None:
        return None
    extra: list[Any] = [None] * len(output.token_ids)
    for index, found in enumerate(output.logprobs or ()):
        extra[index] = {"logprob": found.logprob, "top": found.top}
    if extra and cached is not None:
        extra[0] = {**(extra[0] or {}), "cached": cached}
    return extra
