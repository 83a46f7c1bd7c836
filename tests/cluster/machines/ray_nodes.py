"""Ray on machines of a :class:`~tests.cluster.machines.network.Network`: a head without CPUs, and nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from serve_app.ray_private import environment as env
from serve_app.ray_private.haproxy import haproxy_environment, haproxy_files
from tests.cluster.machines.network import Machine, Network

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
PORT, PASSWORD = 6379, "secret"
# All machines together have the cores of one.
PATIENT = {"RAY_agent_register_timeout_ms": "120000", "RAY_gcs_server_port_wait_time_s": "120"}
MB = 1_000_000
# Compiled once for all of this user's servers: a machine finds them on what it has of this one's disk.
KERNELS = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser() / "kernels"


def environment(**more: str) -> dict[str, str]:
    """What every process of the cluster has: as in ``cluster.yaml``, and a home on the machine's own disk."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_", "PORT"))}
    files = haproxy_files(Path("/run/ha"))
    return {
        **clean, **env.serving_env(), **haproxy_environment(), **files, **PATIENT, "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp", "SERVE_APP_HOME": "/run/home",
        "RAY_AUTH_TOKEN_PATH": "/run/token", **more,
    }  # fmt: skip


class RayCluster:
    """``ray start`` on machines as on any: nobody tells it addresses, and it finds its own."""

    def __init__(
        self, network: Network, files: Mapping[str, str] = MappingProxyType({}), redis: str = "", **more: str
    ) -> None:
        """``files``: what lies on each machine from the start. ``redis``: the address of one that keeps the head's
        state, with :data:`PASSWORD`; nodes then wait for a head that is away.
        """
        waits = {"RAY_gcs_rpc_server_reconnect_timeout_s": "1200"} if redis else {}
        self.network, self.environment, self._files = network, environment(**waits, **more), files
        self._redis = redis
        self.head = self.start_head()

    def start_head(self, instead: Machine | None = None) -> Machine:
        """``instead``: of the machine that was the head before."""
        words = ["--head", f"--port={PORT}", "--num-cpus=0", "--dashboard-host=127.0.0.1"]
        kept = {"RAY_REDIS_ADDRESS": self._redis} if self._redis else {}
        words += [f"--redis-password={PASSWORD}"] if kept else []
        self.head = self._start("head", *words, instead=instead, **kept)
        return self.head

    def add(self, name: str, *, cpus: float = 2, store: int = 300 * MB, **more: str) -> Machine:
        """``more``: variables of this machine."""
        address = f"--address={self.head.address}:{PORT}"
        return self._start(name, address, f"--num-cpus={cpus:g}", store=store, **more)

    def _start(
        self, name: str, *words: str, store: int = 100 * MB, instead: Machine | None = None, **more: str
    ) -> Machine:
        machine = self.network.machine(name, instead=instead)
        machine.run("bash", "-c", f"mkdir -p /run/ha /run/home && ln -s {KERNELS} /run/home/kernels")
        for path, text in {"/run/token": "a" * 64, **self._files}.items():
            machine.write(path, text)
        ray = [BIN / "ray", "start", *words, f"--object-store-memory={store}"]
        for attempt in range(5):
            try:
                machine.run(*ray, env={**self.environment, **more}, seconds=240)
                return machine
            except RuntimeError:
                # Ray gives a node 30 s and no setting for it, which is too little where the cores are busy.
                if attempt == 4:
                    raise
                machine.restart()
        raise AssertionError

    def run(self, *words: object, seconds: float = 600) -> str:
        """A program on the head."""
        return self.head.run(*words, env=self.environment, seconds=seconds)
