"""Ray's private names that tests use, as functions that say what for; `test_contract.py` holds them."""

from __future__ import annotations

from typing import Any


def replica_ports(application: str) -> list[int]:
    """The HTTP ports of an application's replicas, as Serve tells HAProxy."""
    import ray
    from ray.serve.context import _get_global_client

    controller = _get_global_client()._controller
    groups = ray.get(controller.get_target_groups.remote(app_name=application, from_proxy_manager=True))
    return [target.port for group in groups if group.protocol == "HTTP" for target in group.targets]


def called_without_the_token(port: int, pickled: bytes) -> str:
    """What a port says to whoever sends it a call of Serve's between replicas, whose first field is a pickle: the name
    of gRPC's status, "OK" for an answer.
    """
    import grpc
    from ray.serve.generated.serve_pb2 import ASGIRequest

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest", ASGIRequest.SerializeToString)
        try:
            call(ASGIRequest(pickled_request_metadata=pickled), timeout=120)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def object_store_summary() -> str:
    """The text of `ray memory --stats-only`, of the Ray this process is connected to."""
    import ray
    from ray._private.internal_api import memory_summary

    return memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)


def built_deployments(application: dict[str, Any]) -> dict[str, Any]:
    """The deployments of one application of a Serve config file by name, as Serve's own build task makes them."""
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve._private.build_app import build_app

    app = call_user_app_builder_with_args_if_necessary(import_attr(application["import_path"]), application["args"])
    done = build_app(app, name=application["name"], route_prefix=application["route_prefix"])
    return {deployment.name: deployment for deployment in done.deployments}


def take_title(title: str) -> None:
    """Gives this process a title as Ray's agents have one."""
    from ray._raylet import setproctitle

    setproctitle(title)
