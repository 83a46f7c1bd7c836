"""Gateway: the only application with HTTP. Thin: everything it does is in serve_app.gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.util import get_node_ip_address

from deployments.metrics import GatewayMetrics
from deployments.supervisor import WorkerLost
from serve_app.api.errors import OutOfCapacity
from serve_app.gateway.core import Gateway as Core
from serve_app.gateway.http.app import build_http
from serve_app.gateway.http.handle import Numbered, follow
from serve_app.gateway.resume import log as resume
from serve_app.gateway.settings import GatewaySettings
from serve_app.ray_private.detached import detached
from serve_app.ray_private.hinted_router import HINT
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import WorkerGone
from serve_app.wire.message import WrongVersion
from serve_app.wire.methods import C, Method, R


@serve.deployment(name="Gateway")
@serve.ingress()
class Gateway:
    async def __init__(self, settings: GatewaySettings) -> None:  # type: ignore[misc]
        host = get_node_ip_address() if settings.several_nodes else "127.0.0.1"
        self._core = Core(settings, call_application, ask_all_replicas, host)
        await self._core.start()
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

    async def follow(self, model: str, inputs: dict[str, Any], stream_id: str, after: int) -> AsyncIterator[Numbered]:
        """A stream that is resumable, from any frame on; see :func:`serve_app.gateway.http.handle.follow`."""
        async for numbered in follow(self._core, model, inputs, stream_id, after):
            yield numbered


async def ask_all_replicas(model: ServedModel, method: Method[C, R], call: C, stage: str = "") -> list[R]:
    """Calls a method on every replica of one of a model's stages, by default the one that requests are sent to."""
    handle = model.handle(serve.get_deployment_handle, stage)
    return [method.result(told) for told in await handle.broadcast(method.name, call.encode()).results_async()]


async def call_application(model: ServedModel, method: Method[C, R], call: C, stage: str = "", replica: str = "") -> R:
    """Calls a method of a model's application; ``replica`` is a wish. Cancelling the await cancels the call there."""
    handle = model.handle(serve.get_deployment_handle, stage)
    wish = {HINT: replica} if replica else {}
    # A resumable stream goes on when the client has left who asked for it.
    with detached() if resume.current.get() is not None else nullcontext():
        response = getattr(handle, method.name).remote(call.encode(), **wish)
    try:
        return method.result(await response)
    except (RayActorError, WorkerLost, DeploymentUnavailableError) as error:
        raise WorkerGone("a worker of this model was lost") from error
    except WrongVersion as error:
        raise WorkerGone("a worker of this model runs another version") from error
    except BackPressureError as error:
        raise OutOfCapacity(retry_after=model.seconds_per_request) from error
    except RayTaskError as error:
        if isinstance(error.cause, (RayActorError, WorkerLost, WrongVersion)):
            raise WorkerGone("a worker of this model was lost, or runs another version") from error
        raise
