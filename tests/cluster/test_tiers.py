from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from serve_app.ray_private import environment as env
from serve_app.ray_private.haproxy import haproxy_environment
from tests.cluster.apart import told_by

PORTS = (
    "PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)


def free_ports(names: tuple[str, ...]) -> dict[str, str]:
    with ExitStack() as open_:
        probes = [open_.enter_context(socket.socket()) for _ in names]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return {name: str(probe.getsockname()[1]) for name, probe in zip(names, probes, strict=True)}


@pytest.mark.slow
def test_cached_tokens_come_from_every_tier_and_from_another_node():
    """Own blocks, the node's pool, its files and another node's pool, each to the token: see ``tiers.py``."""
    found = told_by("tests.cluster.tiers", {**env.serving_env(), **haproxy_environment(), **free_ports(PORTS)}, 420)
    assert found["steps"] == [{}, {"own": 480}, {"node": 480}, {"disk": 480}, {"remote": 480}]
