"""How gateways and runners of batches reach the models' applications."""

from __future__ import annotations

from contextlib import nullcontext

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.supervisor import WorkerLost
from deployments.tenancy import NoRoom
from serve_app.api.errors import ModelLoading, OutOfCapacity
from serve_app.gateway.resume import log as resume
from serve_app.ray_private.detached import detached
from serve_app.ray_private.hinted_router import HINT
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import WorkerGone
from serve_app.wire.message import WrongVersion
from serve_app.wire.methods import C, Method, R

# After so long somebody else may have gone.
NO_ROOM_S = 10.0


async def ask_all_replicas(model: ServedModel, method: Method[C, R], call: C, stage: str = "") -> list[R]:
    """Calls a method on every replica of one of a model's stages, by default the one that requests are sent to."""
    handle = model.handle(serve.get_deployment_handle, stage)
    return [method.result(told) for told in await handle.broadcast(method.name, call.encode()).results_async()]


async def call_application(model: ServedModel, method: Method[C, R], call: C, stage: str = "", replica: str = "") -> R:
    """Calls a method of a model's application; ``replica`` is a wish. Cancelling the await cancels the call there.
    Raises `ModelLoading` where Serve knows of no such application yet: a model that sleeps is asked before it is ready.
    """
    try:
        handle = model.handle(serve.get_deployment_handle, stage)
    except KeyError as error:
        raise ModelLoading(model.id, retry_after=2.0) from error
    wish = {HINT: replica} if replica else {}
    # A resumable stream goes on when the client has left who asked for it.
    with detached() if resume.current.get() is not None else nullcontext():
        response = getattr(handle, method.name).remote(call.encode(), **wish)
    try:
        return method.result(await response)
    except NoRoom as error:
        raise _refused(error) from error
    except (RayActorError, WorkerLost, DeploymentUnavailableError) as error:
        raise WorkerGone("a worker of this model was lost") from error
    except WrongVersion as error:
        raise WorkerGone("a worker of this model runs another version") from error
    except BackPressureError as error:
        raise OutOfCapacity(retry_after=model.seconds_per_request) from error
    except RayTaskError as error:
        if isinstance(error.cause, (RayActorError, WorkerLost, WrongVersion)):
            raise WorkerGone("a worker of this model was lost, or runs another version") from error
        if isinstance(error.cause, NoRoom):
            raise _refused(error.cause) from error
        raise


def _refused(error: NoRoom) -> OutOfCapacity:
    """What a task's error says of its cause is told, and not where it was raised."""
    cause = getattr(error, "cause", error)
    return OutOfCapacity(f"{cause}.", retry_after=NO_ROOM_S)
