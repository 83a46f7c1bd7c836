"""What the replicas of prefill and decode share: their engine worker, and passing a request's life on to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec.structs import replace
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.autoscale import NEEDED
from deployments.nursery import adopt
from deployments.supervisor import Supervisor, WorkerLost, beside
from deployments.tenancy import tenancy
from deployments.worker import EngineWorker, WorkerHandle
from serve_app import logs
from serve_app.ray_private.draining import draining
from serve_app.wire.address import InboxAddress
from serve_app.wire.decide import Decided, read_decide_call
from serve_app.wire.generate import (
    HERE,
    ArrivingCall,
    Collected,
    GenerateCall,
    Generated,
    GenerateResult,
    Missing,
    PrefillAt,
    PrefillCall,
    PrefillDone,
    Prefilled,
    read_collect_call,
    read_generate_call,
    read_generate_many,
    read_prefill_call,
    read_prefill_result,
)
from serve_app.wire.replicas import AllCounters, Listen, Nothing, Subscribe, Subscribed, read_subscribe
from serve_app.worker.spec import WorkerSpec

log = logging.getLogger("ray.serve")

T = TypeVar("T")

# How often a replica looks whether it drains.
DRAINING_S = 0.25


class EngineStage:
    """A replica with one :class:`~deployments.worker.EngineWorker` of its own.

    Stages are preferences: a prefill replica can generate as well, and a decode replica compute a prompt for another.
    """

    supervisor: Supervisor
    # As the catalogue has it.
    stage = ""
    # What the worker prefers to do, as its load reports say it; it can do both.
    role = "mixed"
    # Where prompts are computed that come without a choice.
    _default_prefill = HERE
    # Prompts that lack fewer tokens are computed here; with none missing there is nothing to compute anywhere.
    _min_remote = 1

    def __init__(self) -> None:
        logs.set_up(f"{type(self).__name__.lower()} replica")
        self._peers: dict[str, DeploymentHandle] = {}
        # Gateways that want load reports: until when, and what they sent.
        self._gateways: dict[InboxAddress, tuple[float, Subscribe]] = {}
        self._leaving = False
        self._watching: asyncio.Task[None] | None = None

    @property
    def replica_id(self) -> str:
        """What Serve calls this replica."""
        return serve.get_replica_context().replica_id.unique_id

    def prefill_elsewhere(self, handle: DeploymentHandle) -> None:
        """Has prompts computed by the prefill stage, unless a request says where."""
        self._peers["prefill"] = handle
        self._default_prefill = PrefillAt("prefill")

    async def start_worker(self, spec: WorkerSpec, num_gpus: float) -> None:
        options = EngineWorker.options(**beside(num_gpus))  # type: ignore[attr-defined]
        self.supervisor = Supervisor(
            lambda: options.remote(spec), self.greet, device=num_gpus > 0, tenancy=tenancy(spec)
        )
        await self.supervisor.begin(await adopt(spec))
        self._watching = asyncio.ensure_future(self._watch_draining())

    async def greet(self, worker: Any) -> None:
        """Awaits a new worker's readiness, and tells it who listens to its predecessor."""
        await WorkerHandle(worker).ready()
        await self._tell_listeners(worker)

    async def subscribe(self, call: bytes) -> bytes:
        """A gateway wants load reports for a while; see :class:`serve_app.wire.replicas.Subscribe`."""
        gateway = read_subscribe(call)
        now = time.monotonic()
        self._gateways = {inbox: kept for inbox, kept in self._gateways.items() if kept[0] > now}
        self._gateways[gateway.inbox] = (now + gateway.lease_s, gateway)
        if listens := self.supervisor.ready:
            told = self._listen(gateway, gateway.lease_s)
            await self.supervisor.reach(lambda worker: WorkerHandle(worker).subscribe(told))
        return Subscribed(self.replica_id, listens).encode()

    def _listen(self, gateway: Subscribe, lease_s: float) -> Listen:
        wish = gateway.roles.get(self.replica_id)
        return Listen(
            gateway.inbox, lease_s, self.replica_id, self.role, wish, gateway.plans, self._leaving,
            gateway.since,
        )  # fmt: skip

    async def _watch_draining(self) -> None:
        """Gateways go by what the worker says: from the moment on at which Serve takes the replica away, it says so."""
        while not draining():
            await asyncio.sleep(DRAINING_S)
        self._leaving = True
        if self.supervisor.ready:
            with contextlib.suppress(WorkerLost):
                await self.supervisor.reach(self._tell_listeners)

    async def _tell_listeners(self, worker: Any) -> None:
        for until, gateway in list(self._gateways.values()):
            if (left := until - time.monotonic()) > 0:
                await WorkerHandle(worker).subscribe(self._listen(gateway, left))

    async def generate(self, call: bytes, replica: str = "") -> bytes:
        """One request from prompt to last token; see :class:`serve_app.wire.generate.GenerateCall`. ``replica`` is for
        the router. Who prefills is a wish as well: the answer is the same wherever the prompt is computed.
        """
        request = read_generate_call(call)
        logs.at_hand.set(request.origin)
        where = request.prefill or self._default_prefill
        if where.stage:
            request = replace(request, prefill_above=self._min_remote)
        result = await self.run_on_worker(request.id, lambda worker: worker.generate(request))
        if isinstance(result, Missing):
            result = await self._handed_over(request, where)
        return (replace(result, replica=self.replica_id) if isinstance(result, Generated) else result).encode()

    async def generate_many(self, call: bytes, replica: str = "") -> bytes:
        """Requests of one worker together; see :class:`serve_app.wire.generate.GenerateMany`."""
        try:
            return await self.supervisor.call(lambda worker: WorkerHandle(worker).generate_many(call, self.replica_id))
        except asyncio.CancelledError:
            for one in read_generate_many(call).calls:
                self._abort(one.id)
            raise

    async def _handed_over(self, request: GenerateCall, where: PrefillAt) -> GenerateResult:
        """Has the prompt computed elsewhere while this replica's worker takes over what is computed already."""
        call = ArrivingCall(request.id)
        running = asyncio.ensure_future(self.run_on_worker(request.id, lambda worker: worker.arriving(call)))
        telling = asyncio.ensure_future(self._prefill_there(request, where))
        try:
            return await running
        finally:
            running.cancel()
            telling.cancel()

    async def _prefill_there(self, request: GenerateCall, where: PrefillAt) -> None:
        """Calls the prefill stage and tells the worker how it ended."""
        # Under a name of its own: a wish may not be followed, and the prompt be computed where it is waited for.
        last_int32 = 4
        ids = request.ids[:-last_int32]
        call = PrefillCall(
            f"{request.id}-prefill",
            ids,
            request.salt,
            request.priority,
            request.share,
            request.adapter,
            request.weight,
            request.origin,
            request.media,
        )
        told = Prefilled(request.id)
        try:
            response = self._peer(where.stage).prefill.remote(call.encode(), replica=where.replica)
            try:
                done = read_prefill_result(await response)
            except asyncio.CancelledError:
                response.cancel()
                raise
            if isinstance(done, PrefillDone):
                told = Prefilled(request.id, done.cached, done.node)
        except Exception as error:  # whatever it was, this worker can prefill as well
            log.warning("prefill of %s failed (%s); computing it here", request.id, type(error).__name__)
        with contextlib.suppress(WorkerLost):
            await self.supervisor.call(lambda worker: WorkerHandle(worker).prefilled(told))

    async def prefill(self, call: bytes, replica: str = "") -> bytes:
        """See :class:`serve_app.wire.generate.PrefillCall`; ``replica`` is for the router."""
        request = read_prefill_call(call)
        return (await self.run_on_worker(request.id, lambda worker: worker.prefill(request))).encode()

    async def decide(self, call: bytes, replica: str = "") -> bytes:
        """See :class:`serve_app.wire.decide.DecideCall`; ``replica`` is for the router."""
        asked = read_decide_call(call)
        logs.at_hand.set(asked.origin)
        result = await self.run_on_worker(asked.id, lambda worker: worker.decide(asked))
        return (replace(result, replica=self.replica_id) if isinstance(result, Decided) else result).encode()

    async def collect(self, call: bytes) -> bytes:
        """See :class:`serve_app.wire.generate.CollectCall`; nothing while there is no worker."""
        if not self.supervisor.ready:
            return Collected().encode()
        asked = read_collect_call(call)
        return (await self.supervisor.call(lambda worker: WorkerHandle(worker).collect(asked))).encode()

    def _peer(self, stage: str) -> DeploymentHandle:
        if stage not in self._peers:
            application = serve.get_replica_context().app_name
            self._peers[stage] = serve.get_deployment_handle(stage.capitalize(), application)
        return self._peers[stage]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For :func:`deployments.autoscale.follow_plan`: replicas of this stage that all gateways together need."""
        now = time.monotonic()
        plans = [gateway.needed for until, gateway in self._gateways.values() if until > now and gateway.needed]
        return {NEEDED: sum(plan.get(self.stage, 0.0) for plan in plans) if plans else -1.0}

    async def wake(self, call: bytes) -> bytes:
        """Does nothing: a call to a stage that has no replica starts one."""
        return Nothing().encode()

    async def run_on_worker(self, request_id: str, call: Callable[[WorkerHandle], Awaitable[T]]) -> T:
        """Awaits a call on the worker. A cancelled caller (the client has gone) aborts the request there at once."""
        try:
            return await self.supervisor.call(lambda worker: call(WorkerHandle(worker)))
        except asyncio.CancelledError:
            self._abort(request_id)
            raise

    def _abort(self, request_id: str) -> None:
        self.supervisor.tell(lambda worker: worker.abort.remote(request_id))

    async def stats(self) -> bytes:
        """See :meth:`deployments.supervisor.Supervisor.counters`."""
        return (await self.supervisor.counters(self.stage)).encode()

    async def all_stats(self, call: bytes) -> bytes:
        """Counters of one worker of each stage behind this deployment."""
        return AllCounters((await self.supervisor.counters(self.stage),)).encode()

    async def probe(self, call: bytes) -> bytes:
        """Ends when the worker answers."""
        await self.supervisor.call(lambda worker: WorkerHandle(worker).ready())
        return Nothing().encode()

    async def check_health(self) -> None:
        await self.supervisor.check(lambda worker: WorkerHandle(worker).needs_draft())
