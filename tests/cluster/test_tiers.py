from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve_app.ray_private import environment as env
from serve_app.ray_private.haproxy import haproxy_environment

ROOT = Path(__file__).resolve().parents[2]
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
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
        environ = {
            **clean, **env.serving_env(), **haproxy_environment(), **free_ports(PORTS), "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": scratch, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "tests.cluster.tiers"], env=environ, capture_output=True, text=True, timeout=420
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["steps"] == [{}, {"own": 480}, {"node": 480}, {"disk": 480}, {"remote": 480}]
