"""Versions of deployments, which Serve makes by itself: a replica goes on where its deployment keeps its version."""

from __future__ import annotations

from typing import Any


def running_versions(application: str) -> dict[str, str]:
    """Those of an application's deployments, by their names; blocks."""
    import ray
    from ray.serve.context import _get_global_client

    deployments = ray.get(_get_global_client()._controller.list_deployments_internal.remote())
    return {name.name: found.version for name, (found, _) in deployments.items() if name.app_name == application}


def of_version(deployment: Any, version: str) -> Any:
    """The deployment, as of a version."""
    return deployment.options(version=version, _internal=True)
