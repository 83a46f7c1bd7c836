"""What the replicas of prefill and decode share: their engine worker, and passing a request's life on to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.autoscale import NEEDED
from deployments.nursery import adopt
from deployments.supervisor import Supervisor, WorkerLost, beside
from serve_app.ray_private.hinted_router import HINT
from serve_app.worker.spec import WorkerSpec

log = logging.getLogger("ray.serve")


class EngineStage:
    """A replica with one :class:`~deployments.worker.EngineWorker` of its own.

    Stages are preferences: a prefill replica can generate as well, and a decode replica compute a prompt for another.
    """

    supervisor: Supervisor
    # As the catalogue has it.
    stage = ""
    # What the worker prefers to do, as its load reports say it; it can do both.
    role = "mixed"
    # Where prompts are computed that come without a choice; None: here.
    _default_prefill: dict[str, str] | None = None
    # Prompts that lack fewer tokens are computed here; with none missing there is nothing to compute anywhere.
    _min_remote = 1

    def __init__(self) -> None:
        self._peers: dict[str, DeploymentHandle] = {}
        # Gateways that want load reports: until when, and what they sent.
        self._gateways: dict[Any, tuple[float, dict[str, Any]]] = {}

    @property
    def replica_id(self) -> str:
        """What Serve calls this replica."""
        return serve.get_replica_context().replica_id.unique_id

    def prefill_elsewhere(self, handle: DeploymentHandle) -> None:
        """Has prompts computed by the prefill stage, unless a request says where."""
        self._peers["prefill"] = handle
        self._default_prefill = {"stage": "prefill", "replica": ""}

    async def start_worker(self, spec: WorkerSpec, num_gpus: float) -> None:
        from deployments.worker import EngineWorker

        options = EngineWorker.options(**beside(num_gpus))  # type: ignore[attr-defined]
        self.supervisor = Supervisor(lambda: options.remote(spec), self.greet)
        await self.supervisor.begin(await adopt(spec))

    async def greet(self, worker: Any) -> None:
        """Awaits a new worker's readiness, and tells it who listens to its predecessor."""
        await worker.info.remote()
        for until, wire in list(self._gateways.values()):
            if (left := until - time.monotonic()) > 0:
                await worker.subscribe.remote({**wire, "lease_s": left})

    async def subscribe(self, wire: dict[str, Any]) -> str:
        """``{"inbox", "lease_s", "needed", "roles"}``: a gateway wants load reports for a while, and says how many
        replicas of each stage its requests need, and what it wishes which replica to prefer. Returns this replica's id.
        """
        wish = wire.get("roles", {}).get(self.replica_id)
        told = {"replica": self.replica_id, "role": self.role, "wish": wish}
        wire = {name: value for name, value in wire.items() if name != "roles"} | told
        now = time.monotonic()
        self._gateways = {key: kept for key, kept in self._gateways.items() if kept[0] > now}
        self._gateways[(wire["inbox"]["host"], wire["inbox"]["port"])] = (now + wire["lease_s"], wire)
        if self.supervisor.ready:
            await self.supervisor.call(lambda worker: worker.subscribe.remote(wire))
        return self.replica_id

    async def generate(self, wire: dict[str, Any]) -> dict[str, Any]:
        """One request from prompt to last token; see :meth:`deployments.worker.EngineWorker.generate` for the wire
        form. ``wire["prefill"]`` may name who computes what is missing of the prompt, ``{"stage", "replica"}``, or be
        None for this worker itself. It is a wish: the answer is the same wherever the prompt is computed.
        """
        where = wire.get("prefill", self._default_prefill)
        if where is not None:
            wire = {**wire, "prefill_above": self._min_remote}
        result = await self._generate(wire)
        if where is None or "missing" not in result:
            return result
        del wire["prefill_above"]
        return await self._handed_over({**wire, "cached": result["cached"], "arriving": True}, where)

    async def _handed_over(self, wire: dict[str, Any], where: dict[str, str]) -> dict[str, Any]:
        """Has the prompt computed elsewhere while this replica's worker takes over what is computed already."""
        running = asyncio.ensure_future(self._generate(wire))
        telling = asyncio.ensure_future(self._prefill_there(wire, where))
        try:
            return await running
        finally:
            running.cancel()
            telling.cancel()

    async def _prefill_there(self, wire: dict[str, Any], where: dict[str, str]) -> None:
        """Calls the prefill stage and tells the worker how it ended."""
        # Under a name of its own: a wish may not be followed, and the prompt be computed where it is waited for.
        request = {"id": f"{wire['id']}-prefill", "salt": wire["salt"], "ids": wire["ids"][:-4]}  # no last int32
        request[HINT] = where["replica"]
        told: dict[str, Any] = {}
        try:
            call = self._peer(where["stage"]).prefill.remote(request)
            try:
                told = await call
            except asyncio.CancelledError:
                call.cancel()
                raise
        except Exception as error:  # whatever it was, this worker can prefill as well
            log.warning("prefill of %s failed (%s); computing it here", wire["id"], type(error).__name__)
        with contextlib.suppress(WorkerLost):
            # Both calls are under way at once: the worker may not know the request yet.
            while not await self.supervisor.call(lambda worker: worker.prefilled.remote(wire["id"], told)):
                await asyncio.sleep(0.01)

    async def prefill(self, wire: dict[str, Any]) -> dict[str, Any]:
        """``{"id", "ids", "salt"}`` -> ``{"cached"}`` once the pool holds the K/V of all ``ids``."""
        return await self.run_on_worker(wire["id"], lambda worker: worker.prefill.remote(wire))

    async def collect(self, wire: dict[str, Any]) -> list[list[Any]]:
        """See :meth:`deployments.worker.EngineWorker.collect`; nothing while there is no worker."""
        return await self.supervisor.call(lambda w: w.collect.remote(wire)) if self.supervisor.ready else []

    async def _generate(self, wire: dict[str, Any]) -> dict[str, Any]:
        result = await self.run_on_worker(wire["id"], lambda worker: worker.generate.remote(wire))
        return {**result, "replica": self.replica_id}

    def _peer(self, stage: str) -> DeploymentHandle:
        if stage not in self._peers:
            application = serve.get_replica_context().app_name
            self._peers[stage] = serve.get_deployment_handle(stage.capitalize(), application)
        return self._peers[stage]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For :func:`deployments.autoscale.follow_plan`: replicas of this stage that all gateways together need."""
        now = time.monotonic()
        plans = [wire["needed"] for until, wire in self._gateways.values() if until > now and wire.get("needed")]
        return {NEEDED: sum(plan.get(self.stage, 0.0) for plan in plans) if plans else -1.0}

    async def wake(self, wire: dict[str, Any]) -> None:
        """Does nothing: a call to a stage that has no replica starts one."""

    async def run_on_worker(self, request_id: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Awaits a call on the worker. A cancelled caller (the client has gone) aborts the request there at once."""
        try:
            return await self.supervisor.call(call)
        except asyncio.CancelledError:
            self.supervisor.tell(lambda worker: worker.abort.remote(request_id))
            raise

    async def stats(self) -> dict[str, Any]:
        """See :meth:`deployments.supervisor.Supervisor.counters`."""
        return await self.supervisor.counters(self.stage, lambda worker: worker.stats.remote())

    async def all_stats(self, wire: dict[str, Any]) -> list[dict[str, Any]]:
        """Counters of one worker of each stage behind this deployment."""
        return [await self.stats()]

    async def probe(self, wire: dict[str, Any]) -> None:
        """Ends when the worker answers."""
        await self.supervisor.call(lambda worker: worker.info.remote())

    async def check_health(self) -> None:
        await self.supervisor.check(lambda worker: worker.check.remote())
