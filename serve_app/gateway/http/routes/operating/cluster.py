"""The cluster as one gateway sees it: nodes, workers, queues, caches, and how that came."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import OperatorOnly
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.exchange import READ, Endpoint, Exchange, json_answer
from serve_app.gateway.status import status


def endpoints(exchange: Exchange) -> list[Endpoint]:
    about = Operation("Nodes, workers, queues and caches, and how they changed", "Server")
    return [Endpoint("GET", "/v1/cluster", ClusterRoutes(exchange).get, about, scopes=READ)]


class ClusterRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def get(self, request: Request) -> Response:
        gateway = self._exchange.gateway
        operator = gateway.settings.account
        if request.state.account != operator:
            # How busy a machine is tells of other people's work.
            raise OperatorOnly("see the cluster", operator)
        told = await status(gateway, operator)
        return json_answer(
            {
                "time": time.time(),
                "gateway": told["gateway"],
                "runners": told["runners"],
                "nodes": nodes(told["models"]),
                "models": [{"model": name, **about} for name, about in told["models"].items()],
                "scaling": list(gateway.scaling.changes),
            }
        )


def nodes(models: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each node that has a worker that reports, with its workers and their load."""
    found: dict[str, list[dict[str, Any]]] = {}
    for model, about in models.items():
        for worker in about.get("routing", {}).get("workers", ()):
            found.setdefault(worker["node"], []).append({"model": model, **worker})
    return [{"node": node, "workers": workers} for node, workers in sorted(found.items())]
