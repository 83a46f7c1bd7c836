"""One Ray cluster for the whole session, and on it, for the tests that want it, the whole local stack.

Ray and Serve read their environment when they are imported, so it is set here, before any test module is loaded.
Temporary files of this session and of the processes that it starts lie in one folder, which goes with it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from tests.databases import empty_database
from tests.parts import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_itemcollected,
    pytest_runtest_makereport,
    pytest_runtestloop,
)
from tests.variants import some

# A machine may be busy.
settings.register_profile("patient", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
    # Read when a Triton kernel is decorated, hence before any test module is imported: no GPU, so its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A short name: paths of Ray's sockets may have a hundred characters, and most of them are Ray's own.
SCRATCH, MADE_BY = Path(tempfile.mkdtemp(prefix="tests-")), os.getpid()
os.environ["TMPDIR"] = tempfile.tempdir = str(SCRATCH)
GONE_S = 20.0

try:
    from serve_app.cluster import LocalCluster
    from serve_app.config import api_key, load_settings
    from serve_app.ray_private.haproxy import haproxy_environment

    haproxy_environment()
except ImportError as missing:  # a machine for the GPU tests needs torch, transformers, Triton and pytest only
    LocalCluster, _MISSING = None, missing

ACCOUNT = "local"
WEIGHTS = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser() / "weights"


def _free_port() -> int:
    """Outside of the range that Ray gives to its workers (10002 to 19999) and Serve to its replicas (30000 to
    31000).
    """
    for port in random.SystemRandom().sample(range(20000, 29000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def share_weights(home: Path) -> None:
    """What `make test` has fetched into the user's state directory is not fetched again into a test's; nothing else is
    shared.
    """
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    if not (home / "weights").exists():
        (home / "weights").symlink_to(WEIGHTS)


def _settings():
    home = SCRATCH / "home"
    home.mkdir()
    share_weights(home)
    return load_settings(
        {
            "SERVE_APP_HOME": str(home),
            "PORT": str(_free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port()),
            "SERVE_APP_OBJECT_STORE_BYTES": "512MiB",
            "SERVE_APP_KV_DISK_BYTES": "64MiB",
            # Another cluster's account, which is made where it is wanted.
            "SERVE_APP_PEERS": "other-cluster",
        }
    )


if LocalCluster is not None:
    _CLUSTER_SETTINGS = _settings()
    _CLUSTER = LocalCluster(_CLUSTER_SETTINGS)
    os.environ.update(_CLUSTER.environment)


@pytest.fixture(scope="session", autouse=True)
def quick_and_patient(request: pytest.FixtureRequest) -> Iterator[None]:
    """Empty databases get their tables quickly, and look-ups have as long as a busy machine needs. HTTP clients share
    one TLS context, which none of them uses: each would read the certificates of all authorities anew, for 26 ms. The
    paths of a gateway's 350 routes are read once, and not for each of some hundred gateways.
    """
    if LocalCluster is None:
        yield
        return
    from starlette.routing import compile_path

    from tests.schema import made_once

    tls = ssl.create_default_context()
    shared = patch("httpx._transports.default.create_ssl_context", lambda **_: tls)
    paths = patch("starlette.routing.compile_path", lru_cache(4096)(compile_path))
    with made_once(), shared, paths, patch("serve_app.state.reader.TIMEOUT_S", 60.0):
        yield
    if request.config.getoption("--part") == "rest" and "ray" in sys.modules:
        # Some of Ray's functions start a cluster where there is none, for as long as the process lives.
        assert not sys.modules["ray"].is_initialized(), "a test has started a Ray of its own"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors as small as those of most tests are slower on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def inbox():
    """A gateway's end of the token channel."""
    from serve_app.channel.inbox import TokenInbox

    inbox = TokenInbox()
    await inbox.start()
    yield inbox
    await inbox.aclose()


@pytest.fixture(scope="session")
def ray_cluster():
    """Ray alone."""
    if LocalCluster is None:
        pytest.skip(f"the server is not installed: {_MISSING}")
    _CLUSTER.start_ray()
    yield
    _CLUSTER.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """A PostgreSQL that the tests start."""
    from benchmarks.serving.postgresql import Server, programs

    folder = programs()
    if folder is None:
        pytest.skip("no PostgreSQL here: `make install-dev` brings one, and so do the system's packages")
    running = Server(folder, in_memory=True)
    try:
        yield running
    finally:
        running.remove()


@pytest.fixture(params=some(["sqlite", "postgresql"], "sqlite"))
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database: a file, or a server. What stands on the store is run with a server where slow tests
    are run, the store itself always (``tests/state/conftest.py``).
    """
    yield from empty_database(request, tmp_path)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing stays behind in the temporary directory. Processes that are ending may write a little longer."""
    until = time.monotonic() + GONE_S
    if os.getpid() != MADE_BY:
        return
    while SCRATCH.exists() and time.monotonic() < until:
        shutil.rmtree(SCRATCH, ignore_errors=True)
        time.sleep(0.05 * SCRATCH.exists())
    if SCRATCH.exists():
        raise pytest.UsageError(f"somebody still writes to {SCRATCH}: {sorted(SCRATCH.rglob('*'))[:10]}")


@dataclass(frozen=True)
class Stack:
    """The running server, as a client sees it."""

    url: str
    key: str
    home: Path

    @property
    def api(self) -> str:
        return f"{self.url}/client/v4/accounts/{ACCOUNT}/ai"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def health(self) -> tuple[int, dict]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_ready(self, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        last: object = None
        while time.monotonic() < until:
            try:
                status, last = self.health()
                # Ready means that models answer; "running" that optional parts (the draft model) are there as well.
                if status == 200 and all(m["state"] == "running" for m in last["models"].values()):
                    return
            except (OSError, ValueError) as error:
                last = error
            time.sleep(0.25)
        raise AssertionError(f"not ready after {seconds} s: {last}")


@pytest.fixture(scope="session")
def stack(ray_cluster) -> Stack:
    """The local profile: gateway, prefill, decode, draft, embeddings and reranker on their real path."""
    _CLUSTER.start_serving()
    _CLUSTER.deploy_rest()
    running = Stack(f"http://127.0.0.1:{_CLUSTER_SETTINGS.port}", api_key(_CLUSTER_SETTINGS), _CLUSTER_SETTINGS.home)
    running.wait_ready()
    return running
