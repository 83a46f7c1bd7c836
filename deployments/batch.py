"""Batch: runs batches and queues. A gateway core of its own, without HTTP, whose requests come from the store."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import ray
from ray import serve
from ray.util import get_node_ip_address

from deployments.calls import ask_all_replicas, call_application
from deployments.metrics import GatewayMetrics
from serve_app import logs
from serve_app.gateway.batches import Works
from serve_app.gateway.core import Gateway as Core
from serve_app.gateway.http.request_id import ids_at_hand
from serve_app.gateway.settings import GatewaySettings
from serve_app.ray_private.zones import node_zone

# A call of a gateway ends when there has been nothing to do for so long; the replica goes a while later.
IDLE_S = 3.0
# How much nicer a runner is than the other workers: of a core that they want, too, it gets a third of what they do.
NICE = 5


def make_way() -> None:
    """Lets this thread, and those that it starts, wait for a core rather than take it from a thread that computes: an
    engine on the same machine, or a gateway with clients.
    """
    with suppress(AttributeError, OSError):  # Linux alone has this policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICE)


@serve.deployment(name="Batch")
class Batch:
    async def __init__(self, settings: GatewaySettings) -> None:  # type: ignore[misc]
        logs.set_up("runner", ids_at_hand)
        make_way()
        host = get_node_ip_address() if settings.several_nodes else "127.0.0.1"
        self._core = Core(settings, call_application, ask_all_replicas, host)
        self._core.node = ray.get_runtime_context().get_node_id()
        self._core.engine.zone = node_zone()
        await self._core.start(clients=False)
        self._metrics = GatewayMetrics(self._core.routing_stats, self._core.tally)
        self._metrics.start()
        self._works = Works(self._core)
        self._running = asyncio.ensure_future(self._works.run())

    async def work(self) -> None:
        """Returns when nothing has been left to do for a while: for so long Serve keeps replicas for its callers."""
        self._works.wake()
        while self._works.idle_s < IDLE_S:
            if self._running.done():
                raise RuntimeError("the runner has ended") from self._running.exception()
            await asyncio.sleep(IDLE_S / 10)

    async def nudge(self) -> None:
        """There is something new."""
        self._works.wake()

    async def check_health(self) -> None:
        if self._running.done():
            raise RuntimeError("the runner has ended") from self._running.exception()

    def __del__(self) -> None:
        # Serve calls this when the replica has ended its requests, Python perhaps again.
        if (core := getattr(self, "_core", None)) is not None:
            if (running := getattr(self, "_running", None)) is not None:
                running.cancel()
                self._works.release()
            core.close()
