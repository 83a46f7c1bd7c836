"""What an engine worker does, without Ray: runs requests on an engine and sends their tokens out."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from serve_app import logs
from serve_app.adapters.config import AdapterRefused
from serve_app.channel.sender import TokenSender
from serve_app.channel.served import gateway_name
from serve_app.engine.loop import EngineLoop
from serve_app.engine.request import Request
from serve_app.engine.step import StepOutput
from serve_app.wire.address import InboxAddress
from serve_app.wire.decide import DecideCall, DecideResult
from serve_app.wire.generate import (
    AdapterAt,
    ArrivingCall,
    CollectCall,
    Collected,
    Failed,
    GenerateCall,
    Generated,
    GeneratedMany,
    GenerateMany,
    GenerateResult,
    Missing,
    PrefillCall,
    PrefillDone,
    Prefilled,
    PrefillResult,
)
from serve_app.wire.replicas import Counters, Listen, Pulse
from serve_app.wire.tokens import Acked, Ending
from serve_app.worker.adapter_files import open_adapters
from serve_app.worker.deciding import decide
from serve_app.worker.draft_link import DraftLink
from serve_app.worker.kv_read import PoolReader, Stored
from serve_app.worker.load_report import EngineLoad
from serve_app.worker.media import BadMedia, Look, look_at, put_into
from serve_app.worker.pool_watch import PoolWatch
from serve_app.worker.requests import Finished, Requests, Running, request_of, token_item

if TYPE_CHECKING:
    from serve_app.worker.loading import Loaded
    from serve_app.worker.spec import WorkerSpec

log = logging.getLogger(__name__)

# How long a gateway may be out of reach before its requests are given up.
INBOX_GRACE_S = 10.0
# How long a gateway that has to ask for tokens waits for the first, and what it gets at once.
COLLECT_WAIT_S = 1.0
COLLECT_PERIOD_S = 0.05


class EngineWork:
    """Everything asynchronous (calls, pool, token frames) happens on one event loop; the engine has a thread of its own
    and speaks to the loop once per step.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        loaded: Loaded,
        draft: DraftLink,
        *,
        node_id: str,
        worker_id: str,
        zone: str = "",
    ) -> None:
        """``worker_id`` is what gateways know the worker's connections by."""
        self.spec = spec
        self.draft = draft
        self._engine = engine = loaded.engine
        self.root_of = loaded.root_of
        self._publisher = loaded.publisher
        self._ranks = loaded.ranks
        self._node_id = node_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine_loop = EngineLoop(engine, self._on_outputs, name=f"{spec.stage}-engine")
        self.requests = Requests(self._engine_loop.abort)
        self.adapters = open_adapters(spec, loaded.model.adapters, self._engine_loop, self._fail)
        self.media = loaded.media
        self._reader = PoolReader(self._publisher.client, engine, self._engine_loop, self._publisher.states)
        self._reader.several_nodes = spec.several_nodes
        self._sender = TokenSender(worker_id, on_lost=self._inbox_lost, on_closed=self._abort)
        told = self._reader.fetches, self.adapters, loaded.weights, PoolWatch(self._publisher.client)
        self._load = EngineLoad(spec.model, spec.stage, node_id, engine, self._sender, *told, zone)
        self._load.reads = self._reader

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def generate(self, call: GenerateCall) -> GenerateResult:
        """Runs one request to its end; tokens go to its inbox as they come. With ``prefill_above`` perhaps
        :class:`Missing`, and then :meth:`arriving` is the second half.
        """
        logs.at_hand.set(call.origin)
        try:
            request, looks = self._read(call)
        except BadMedia as bad:
            return Failed(str(bad), refused=True)
        running = self._register(request, call, looks)
        parked = False
        try:
            if self.adapters is not None and call.adapter is not None:
                self.adapters.expect(call.adapter)
            if (refused := await self._compile(running.request)) is not None:
                return Failed(refused, refused=True)
            # A row that is copied tells nothing: what is to be told of a prompt is computed here, where it is wanted.
            told = call.sampling.prompt_logprobs is not None
            stored = await (self._reader.computed(running.prompt) if told else self._reader.stored(running.prompt))
            if running.done.done():
                return running.failed()
            missing = len(running.request.tokens) - 1 - stored.covered
            # Without a pool nothing comes from a prefill.
            near = told or self._reader.client.away or not self._reader.pooled
            if not near and call.prefill_above is not None and missing >= call.prefill_above:
                running.found = stored.covered
                self.requests.park(running)
                parked = True
                return Missing(missing, stored.covered)
            return await self._run(running, stored)
        finally:
            if not parked:
                self._forget(call.id)

    async def generate_many(self, call: GenerateMany, replica: str) -> GeneratedMany:
        """Runs requests that came together, each as :meth:`generate` does, and tells of each end at once. ``replica``:
        Serve's id of the one that asks.
        """
        running = (self._one_of_many(one, replica) for one in call.calls)
        return GeneratedMany(tuple(await asyncio.gather(*running)))

    async def _one_of_many(self, call: GenerateCall, replica: str) -> Generated | Failed:
        try:
            result = await self.generate(call)
        except Exception as error:  # of this one alone
            log.exception("request %s failed", call.id)
            result = Failed(f"it failed here ({type(error).__name__})")
        assert not isinstance(result, Missing)
        if isinstance(result, Generated):
            result = replace(result, replica=replica)
        if call.inbox is not None:
            self._sender.ended(call.inbox, Ending(call.id, result.encode()))
        return result

    async def arriving(self, call: ArrivingCall) -> GenerateResult:
        """Goes on with a request that was answered with :class:`Missing`: takes over what prefill computes meanwhile,
        until :meth:`prefilled` says that it has ended.
        """
        running = self.requests.resume(call.id)
        if running is None:
            return Failed("the request is not waiting here any more")
        assert running.prefilled is not None
        self._load.changed()
        try:
            stored = await self._reader.arriving(running.prompt, running.prefilled)
            if running.done.done():
                return running.failed()
            # What prefill found stored as well was not computed for this request either.
            running.cached = max(running.found, running.prefilled.result().cached if running.prefilled.done() else 0)
            return await self._run(running, stored)
        finally:
            self._forget(call.id)

    async def prefilled(self, told: Prefilled) -> None:
        """Says how the prefill that a request waits for has ended."""
        running = self.requests.get(told.id)
        if running is not None and running.prefilled is not None and not running.prefilled.done():
            running.prefilled.set_result(told)

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """Computes and publishes the K/V of a prompt; returns once the pool of this node holds them."""
        logs.at_hand.set(call.origin)
        try:
            request, looks = self._read(call)
        except BadMedia as bad:
            return Failed(str(bad), refused=True)
        self._publisher.awaited.add(call.id)
        try:
            result = await self.run_here(request, call.adapter, looks, pooled=True)
            await self._publisher.published(call.id)
            return result if isinstance(result, Failed) else PrefillDone(result.cached, self._node_id)
        finally:
            self._publisher.awaited.discard(call.id)

    async def decide(self, call: DecideCall) -> DecideResult:
        return await decide(self, call)

    async def run_here(
        self, request: Request, at: AdapterAt | None, looks: Sequence[Look] = (), *, pooled: bool = False
    ) -> Finished | Failed:
        """Runs a request whose tokens go nowhere. ``pooled``: its prompt may come from the pool, and goes there."""
        running = self._register(request, None, looks)
        try:
            stored = await self._reader.stored(running.prompt) if pooled else None
            if (failed := await self._placed(running, at, stored.covered if stored is not None else 0)) is not None:
                return failed
            if stored is None:
                self._engine_loop.add(request)
            else:
                self._start(running, stored)
            return await running.done
        finally:
            self._forget(request.id)

    async def collect(self, call: CollectCall) -> Collected:
        """The tokens of a request that have come up and not been asked for before. Waits a moment for the first; empty
        where there is no such request.
        """
        self._sender.acknowledged([Acked(call.id, call.offset, False)])
        until = time.monotonic() + COLLECT_WAIT_S
        while call.id in self.requests and time.monotonic() < until:
            await asyncio.sleep(COLLECT_PERIOD_S)
            if items := self._sender.undelivered(call.id):
                return Collected(tuple(items))
        return Collected()

    async def abort(self, request_id: str) -> None:
        """Ends a request; it is no error if it is gone already."""
        self._abort(request_id)

    async def subscribe(self, call: Listen) -> None:
        """See :meth:`serve_app.worker.load_report.EngineLoad.subscribe`."""
        self._load.subscribe(call)

    def export_chunk(self, chunk_id: str) -> np.ndarray:
        """A published chunk's bytes, for the pool, which then owns the object."""
        return self._publisher.exports.take(chunk_id)

    def stats(self) -> Counters:
        """Counters and gauges of this worker."""
        engine, scheduler = self._engine, self._engine.scheduler
        numbers = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "used_blocks": scheduler.blocks.used_blocks,
            "cached_blocks": scheduler.blocks.cached_blocks,
            "total_blocks": scheduler.blocks.num_blocks - 1,
            "preemptions": scheduler.preemptions,
            "turns": scheduler.sharing.turns.given,
            **engine.stats.numbers(),
            "speculation": engine.speculation.stats() if engine.speculation is not None else None,
            "draft_connected": self.draft.connected,
            "adapters": self.adapters.stats() if self.adapters is not None else None,
            "media": {medium: work.stats() for medium, work in self.media.items()} or None,
            "pool": self._publisher.stats() | self._reader.stats(),
            "ranks": self._ranks.states() if self._ranks is not None else None,
        }
        return Counters(self.spec.stage, os.getpid(), {"replica": self._load.replica} | numbers)

    def pulse(self) -> Pulse:
        """That this process is there, and how long its step has lasted."""
        return Pulse(os.getpid(), self._engine_loop.clock.seconds)

    def needs_draft(self) -> bool:
        """Whether the draft model is wanted but out of reach. Raises if the engine's thread has ended."""
        if self._engine_loop.failed is not None:
            raise RuntimeError("the engine has stopped") from self._engine_loop.failed
        wanted = self.spec.draft_tokens > 0 and self.spec.draft_method == "deployment"
        return wanted and not self.draft.connected

    async def aclose(self) -> None:
        """Ends the engine's thread and the connections to gateways."""
        self._load.close()
        if self.adapters is not None:
            self.adapters.close()
        for work in self.media.values():
            await asyncio.to_thread(work.close)
        await self._sender.aclose()
        await asyncio.get_running_loop().run_in_executor(None, self._engine_loop.stop)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _read(self, call: GenerateCall | PrefillCall) -> tuple[Request, list[Look]]:
        """The call's request and its pictures and sounds. Raises :class:`BadMedia`."""
        request = request_of(call, self.root_of(call.salt, call.adapter.digest if call.adapter else ""))
        return request, put_into(request, call.media, self.media, call.salt)

    def _register(self, request: Request, call: GenerateCall | None, looks: Sequence[Look]) -> Running:
        self._loop = self._publisher.loop = asyncio.get_running_loop()
        return self.requests.register(request, call, looks)

    def _start(self, running: Running, stored: Stored) -> None:
        self._engine_loop.add(running.request, stored.prefix, held=stored.held)
        self._load.changed()

    async def _run(self, running: Running, stored: Stored) -> GenerateResult:
        """From the engine's first step for the request to its last; what is stored is there."""
        request, call = running.request, running.call
        assert call is not None
        if (failed := await self._placed(running, call.adapter, stored.covered)) is not None:
            return failed
        if call.inbox is not None:
            running.streamed = True
            running.caller = gateway_name(call.inbox), request.tenant.hex(), call.priority
            self._sender.open(request.id, call.inbox, request.resumed)
        self._start(running, stored)
        result = await running.done
        if isinstance(result, Failed):
            return result
        path = self._reader.done(request, stored, result.cached, running.first_token_s, running.started)
        # Whatever the gateway has not acknowledged goes along, so that the answer never depends on the channel.
        undelivered = tuple(self._sender.undelivered(request.id))
        return Generated(result.reason, result.cached, path, undelivered, prompt_logprobs=result.prompt_logprobs)

    async def _placed(self, running: Running, at: AdapterAt | None, stored: int) -> Failed | None:
        """Waits for the request's adapter and for its files behind the first ``stored`` tokens; how it has ended."""
        if running.looks and (failed := await look_at(running.looks, stored, running.done)) is not None:
            return failed
        if at is not None:
            if self.adapters is None:
                return Failed("the model takes no adapters; give it lora: true in its record", refused=True)
            try:
                running.request.adapter = await self.adapters.place(running.request.id, at, running.done)
            except AdapterRefused as refused:
                return Failed(f"its adapter can't be used: {refused}", refused=True)
            except Exception as error:  # another worker may reach the files
                log.warning("adapter %s can't be loaded: %s: %s", at.digest[:16], type(error).__name__, error)
                return Failed(f"its adapter can't be loaded here ({type(error).__name__})")
        return running.failed() if running.done.done() else None

    async def _compile(self, request: Request) -> str | None:
        """Gives a request its grammar, beside the event loop; the reason where that is impossible."""
        masks = self._engine.runner.masks
        if masks is None or request.sampling.grammar is None:
            return None
        try:
            await asyncio.to_thread(masks.compile, request)
        except ValueError as error:
            return f"its grammar can't be used: {error}"
        return None

    def _forget(self, request_id: str) -> None:
        self._sender.close(request_id)
        self.requests.forget(request_id)
        if self.adapters is not None:
            self.adapters.release(request_id)

    def _abort(self, request_id: str) -> None:
        self._fail(request_id, "aborted")

    def _fail(self, request_id: str, why: str) -> None:
        self._engine_loop.abort(request_id)
        self.requests.end(request_id, Failed(why))

    def _on_outputs(self, outputs: list[StepOutput]) -> None:
        # Engine's thread. One wake-up of the event loop per step, whatever the batch size.
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        items = []
        for output in outputs:
            running = self.requests.get(output.request_id)
            if running is None or running.done.done():
                continue
            # What was found for it, as far as this engine has come to use it.
            cached = running.cached = output.cached if running.cached is None else min(running.cached, output.cached)
            new = len(output.token_ids)
            first = running.tokens == 0
            if running.caller is not None:
                uncached = max(running.given - cached, 0)
                read = (uncached, cached) if first else (0, 0)
                self._load.served.add(*running.caller, uncached=read[0], cached=read[1], output=new)
            if first:
                running.begins()
            running.tokens += new
            if output.error is not None:
                refused = output.finish_reason == "refused"
                self.requests.end(output.request_id, Failed(output.error, refused=refused))
                continue
            if running.streamed:
                item = running.due(token_item(output, cached if first and new else None), first=first)
                if item is not None:
                    items.append(item)
            if output.finish_reason is not None:
                told = Finished(output.finish_reason, cached, output.prompt_logprobs, output.logprobs)
                self.requests.end(output.request_id, told)
        if items:
            self._sender.send(items)

    def _inbox_lost(self, address: InboxAddress, request_ids: list[str]) -> None:
        """A gateway that does not come back has no readers: give its requests' places to others."""

        def give_up() -> None:
            if not self._sender.connected(address):
                for request_id in request_ids:
                    self._abort(request_id)

        asyncio.get_running_loop().call_later(INBOX_GRACE_S, give_up)
