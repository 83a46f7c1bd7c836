"""What Serve's controller says of its applications, as the plain data that it sends.

``serve.status()`` says the same, but makes objects of all that comes along, and pickles each deployment's request
router for that: some 40 ms without a pause for anybody else in the process, for what is asked every few seconds.
"""

from __future__ import annotations

from typing import Any


def applications() -> dict[str, dict[str, Any]]:
    """By name; nothing where Serve has not been started. Each has ``status``, ``message`` and ``deployments``: by name,
    ``status`` and ``replicas``, each with its ``state``. All of these are strings. Blocks.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return client.get_serve_details()["applications"] if client is not None else {}


def live_deployments(application: str) -> dict[str, dict[str, Any]]:
    """Deployments of an application of which :func:`applications` tells none, since it is being built anew or could not
    be. As there; of their replicas only those that run. Blocks.
    """
    import ray
    from ray.serve._private.common import DeploymentStatusInfo
    from ray.serve.context import _get_global_client
    from ray.serve.generated.serve_pb2 import DeploymentStatusInfo as Sent

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for deployment, replicas in ray.get(client._controller._all_running_replicas.remote()).items():
        if deployment.app_name != application:
            continue
        sent = ray.get(client._controller.get_deployment_status.remote(deployment.name, application))
        if sent is not None:
            told = DeploymentStatusInfo.from_proto(Sent.FromString(sent))
            running = [{"state": "RUNNING"} for _ in replicas]
            found[deployment.name] = {"status": told.status.value, "message": told.message, "replicas": running}
    return found
