"""Clusters of ``ray start`` on one machine, and clients that ask them all the while."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.serving.processes import born, descendants, name_of
from serve_app.ray_private import environment as env
from serve_app.ray_private.haproxy import haproxy_environment, haproxy_files
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
    """A head without replicas, which keeps its state in a Redis, and a node, as if they were two machines. Without a
    Redis it is one machine.
    """

    def __init__(self, folder: Path, redis: str = "", password: str = "") -> None:
        self._folder, self._redis, self._password = folder, redis, password
        (folder / "token").write_text("a" * 64)
        (folder / "home").mkdir()
        # Compiled once for all of this user's servers.
        kept = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser() / "kernels"
        if kept.exists():
            (folder / "home" / "kernels").symlink_to(kept)
        with ports(4) as (self._gcs, self._dashboard, unused, own):
            self.url = f"http://127.0.0.1:{own if redis else unused}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
        self._environment = {
            **clean, **env.serving_env(), **haproxy_environment(), **PATIENT, "SPT_NOENV": "1",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "PYTHONPATH": str(ROOT), "SERVE_APP_API_KEY": KEY,
            "SERVE_APP_HOME": str(folder / "home"), "SERVE_APP_PORT": str(unused),
            # The node's HAProxy has a port of its own, since it has no machine of its own.
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(own), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.head = self.node = self.start_head()
        if redis:
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
                cwd=self._folder,  # Ray puts the folder that it was started in before all others
            )  # fmt: skip

    def start_head(self) -> subprocess.Popen[bytes]:
        """Until it stays, as systemd does it."""
        temporary = self._folder / "ray"
        words = [f"--port={self._gcs}", f"--temp-dir={temporary}", f"--dashboard-port={self._dashboard}"]
        kept = {"RAY_REDIS_ADDRESS": self._redis} if self._redis else {}
        words += ["--num-cpus=0", f"--redis-password={self._password}"] if kept else ["--num-cpus=8"]
        while True:
            # By this file and the node's raylet Ray takes the lost head for one that runs.
            (temporary / "ray_current_cluster").unlink(missing_ok=True)
            self.head = self._start("head", "--head", *words, **kept)
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

    def deploy(self, change: Callable[[dict[str, Any]], None] = lambda config: None) -> None:
        """``change(config)``: what is different from what ``serve-app config`` prints."""
        config = yaml.safe_load(self._run("serve-app", "config", "local", "--models", MODEL))
        change(config)
        (self._folder / "config.yaml").write_text(yaml.safe_dump(config))
        self._run("serve", "deploy", "--address", f"http://127.0.0.1:{self._dashboard}", self._folder / "config.yaml")

    def ask(self) -> str:
        """The text of a stream. Raises :class:`httpx.HTTPError`, also where it is refused."""
        words = []
        with httpx.stream(
            "POST", f"{self.url}/v1/chat/completions", headers={"Authorization": f"Bearer {KEY}"},
            json={**BODY, "stream": True}, timeout=120,
        ) as answer:  # fmt: skip
            if answer.status_code != 200:
                said = f"{answer.status_code}: {answer.read().decode()}"
                raise httpx.HTTPStatusError(said, request=answer.request, response=answer)
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
def asking(cluster: Cluster, clients: int) -> Iterator[list[str | Exception]]:
    """What clients get, each one stream after the other, until the block ends."""
    got: list[str | Exception] = []
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
