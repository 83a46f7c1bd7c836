"""Gateway: the only application with HTTP. Thin: everything it does is in serve_app.gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from deployments.calls import ask_all_replicas, call_application
from deployments.memory_broker import Brokers
from deployments.metrics import GatewayMetrics
from deployments.operate import Applications
from serve_app import logs
from serve_app.config import Settings
from serve_app.gateway.batches import Works
from serve_app.gateway.core import Gateway as Core
from serve_app.gateway.http.app import build_http
from serve_app.gateway.http.handle import Numbered, follow
from serve_app.gateway.http.request_id import ids_at_hand
from serve_app.gateway.neighbours import join
from serve_app.gateway.settings import GatewaySettings
from serve_app.ray_private.zones import node_zone


@serve.deployment(name="Gateway")
@serve.ingress()
class Gateway:
    async def __init__(  # type: ignore[misc]
        self, settings: GatewaySettings, batch: DeploymentHandle | None = None, site: Settings | None = None
    ) -> None:
        """``site``: what models that are started by hand are deployed with."""
        logs.set_up("gateway", ids_at_hand)
        host = get_node_ip_address() if settings.several_nodes else "127.0.0.1"
        self._core = Core(settings, call_application, ask_all_replicas, host)
        if batch is not None:
            runners = self._core.runners
            runners.work, runners.nudge = batch.work.remote, batch.nudge.remote
            runners.here = lambda: Works(self._core, clients=True)
        self._core.by_hand.deployer = None if site is None else Applications(site)
        self._core.history.others = partial(self._ask_gateways, "told")
        self._core.ask_counted = partial(self._ask_gateways, "counted")
        self._core.node = ray.get_runtime_context().get_node_id()
        self._core.engine.zone = node_zone()
        if settings.memory_budget:
            self._core.health.memory.ask = Brokers().shown
            self._core.health.memory.budget = settings.memory_budget
            self._core.by_hand.unfit = self._core.health.memory.would
        await self._core.start()
        self._neighbours = join(self._core)
        self._metrics = GatewayMetrics(self._core.routing_stats, self._core.tally)
        self._metrics.start()

    def __del__(self) -> None:
        # Serve calls this when the replica has ended its requests, Python perhaps again.
        if (core := getattr(self, "_core", None)) is not None:
            core.close()

    async def __serve_build_asgi_app__(self) -> Any:
        return build_http(self._core)

    async def run(self, model: str, inputs: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        """The Python handle's call: the envelope with the result, or with the error and its status."""
        return await self._core.run_handle(model, inputs, request_id)

    async def run_stream(self, model: str, inputs: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The same as a stream: one dict per event, the last with ``finish_reason`` and ``usage``."""
        async for item in self._core.stream_handle(model, inputs):
            yield item

    async def told(self) -> bytes:
        """What this gateway has done in the last seconds, for another one."""
        return self._core.history.told()

    async def counted(self) -> bytes:
        """What this gateway has counted since its start, for the one that is asked for metrics."""
        return self._core.counted()

    async def _ask_gateways(self, what: str) -> list[bytes]:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return await handle.broadcast(what).results_async()

    async def follow(self, model: str, inputs: dict[str, Any], stream_id: str, after: int) -> AsyncIterator[Numbered]:
        """A stream that is resumable, from any frame on; see :func:`serve_app.gateway.http.handle.follow`."""
        async for numbered in follow(self._core, model, inputs, stream_id, after):
            yield numbered
