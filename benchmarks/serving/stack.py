"""What a benchmark measures, started for it alone and ended with it: the local stack, or Ray with a random model. A
server that runs already can be measured as well, and a Ray that this process is connected to is used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.startup import all_ready


@dataclass(slots=True, frozen=True)
class LocalStack:
    """Where it listens, the key it takes, and the id of its first process."""

    url: str
    key: str
    pid: int


def running_stack(home: Path) -> LocalStack:
    """The server that was started with this state directory."""
    from serve_app.cluster import read_attachment
    from serve_app.config import api_key, load_settings

    found = read_attachment(home)
    return LocalStack(found.url, api_key(load_settings({"SERVE_APP_HOME": str(home)})), found.pid)


# Until all models are ready: a machine that is busy takes a minute.
READY_S = 600.0


class Server:
    """``serve-app serve``; ``environment`` is set for it alone. It can be started again after its end."""

    def __init__(self, port: int, **environment: str) -> None:
        self.key, self.url = "benchmark-" + os.urandom(12).hex(), f"http://127.0.0.1:{port}"
        self._environment = {**os.environ, "PORT": str(port), "SERVE_APP_API_KEY": self.key, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when all of its models are ready."""
        command = [sys.executable, "-m", "serve_app.cli", "serve"]
        self._process = subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL)
        until = time.monotonic() + READY_S
        while not all_ready(self.url):
            if self._process.poll() is not None:
                raise SystemExit("the server ended by itself; run `serve-app serve` to see why")
            if time.monotonic() > until:
                raise SystemExit(f"not all models are ready after {READY_S:g} s; run `serve-app serve` to see why")
            time.sleep(0.5)

    def wait(self, seconds: float) -> int | None:
        """Its status when it has ended by itself; None if it has not."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def stop(self) -> int:
        """Ends it as Ctrl-C does; its status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        return self._process.wait(60)


@contextlib.contextmanager
def local_stack(port: int, home: Path | None = None, **environment: str) -> Iterator[LocalStack]:
    """``serve-app serve`` with all of its models ready; ``environment`` is set for it alone. With ``home``, the server
    that runs already with that state directory.
    """
    if home is not None:
        yield running_stack(home)
        return
    server = Server(port, **environment)
    try:
        server.start()
        yield LocalStack(server.url, server.key, server.pid)
    finally:
        server.stop()


def write_checkpoint(folder: Path, size: str) -> Path:
    """A random model (see ``benchmarks checkpoint`` for sizes), written by a process that imports torch for it."""
    write = [sys.executable, "-m", "benchmarks", "checkpoint", str(folder), size]
    subprocess.run(write, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


@contextlib.contextmanager
def private_ray(size: str) -> Iterator[Path]:
    """Ray without Serve, and the folder of a random model (see ``benchmarks checkpoint`` for sizes)."""
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as scratch:
        checkpoint = write_checkpoint(Path(scratch) / "model", size)
        with bare_ray(1 << 30):
            yield checkpoint


@contextlib.contextmanager
def bare_ray(object_store_bytes: int) -> Iterator[None]:
    """A Ray of its own, or the one that this process is connected to."""
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nothing but this process reaches this Ray's work
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, object_store_memory=object_store_bytes,
        namespace="serve_app", log_to_driver=False,
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()
