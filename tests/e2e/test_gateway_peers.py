"""Gateways reach each other through Serve."""

from __future__ import annotations

import os
from typing import Any

import pytest
from ray import serve

from deployments.gateway import ask_gateways

NAME = "peers"


@serve.deployment(name="Peers", num_replicas=2, ray_actor_options={"num_cpus": 0})
class Peers:
    async def for_peer(self, method: str, wire: dict[str, Any]) -> Any:
        return [os.getpid(), method, wire]

    async def ask(self) -> list[Any]:
        return await ask_gateways("get", {"account": "a", "id": "r"})


@pytest.fixture
def application(stack):
    serve.run_many([serve.RunTarget(target=Peers.bind(), name=NAME, route_prefix=None)])
    yield
    serve.delete(NAME)


async def test_every_gateway_is_asked(application):
    told = await serve.get_deployment_handle("Peers", NAME).ask.remote()
    assert len({pid for pid, _, _ in told}) == 2
    assert all(rest == ["get", {"account": "a", "id": "r"}] for _, *rest in told)
