"""The cloud's side: machines are asked for, listed, tagged and given back by HTTP, as Ray's provider for it does."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from tests.cluster.machines.network import GIB, Machine, Network
from tests.cluster.machines.ray_nodes import BIN, KERNELS

HERE = Path(__file__).parent
# Where the provider lies on every machine, as a cloud's package would in its images.
SDK = "/opt/cloud"
# What the types of machines in cluster.yaml say that they have. As long as nobody uses it, nobody misses it.
MEMORY_GIB = {"m6i.2xlarge": 32, "p4de.24xlarge": 1152}


def why_not() -> str | None:
    """Why there can be no such machines here."""
    for program in ("/usr/sbin/sshd", "ssh", "ssh-keygen", "rsync", "make", "useradd"):
        if shutil.which(program) is None:
            return f"there is no {program}; `apt-get install openssh-server openssh-client rsync make`"
    return None


class Cloud:
    """Answers at ``url``. All machines ever made stay in ``made``, by their ids, with what they were made for."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.made: dict[str, Machine] = {}
        self.types: dict[str, str] = {}
        self._tags: dict[str, dict[str, str]] = {}
        key = network.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.key = key
        cloud = self

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                said = cloud.answer(self.path.strip("/"), json.loads(self.rfile.read(size) or b"{}"))
                body = json.dumps(said).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        # One thread, which lives as long as the cloud: a machine ends with the thread that made it.
        self._server = HTTPServer((network.address, 0), Answers)
        self.url = f"http://{network.address}:{self._server.server_port}"

    def answer(self, what: str, told: dict[str, Any]) -> Any:
        match what:
            case "create":
                return [self._create(told["config"], told["tags"]) for _ in range(told["count"])]
            case "tag":
                self._tags[told["id"]] |= told["tags"]
                return {}
            case "terminate":
                self.made[told["id"]].stop()
                return {}
        return {
            name: {"address": machine.address, "tags": self._tags[name]}
            for name, machine in self.made.items()
            if machine.running
        }

    def _create(self, config: dict[str, Any], tags: dict[str, str]) -> str:
        kind = config["InstanceType"]
        name = f"{kind.split('.')[0]}-{len(self.made)}"
        machine = self.network.machine(name, shared_memory=MEMORY_GIB[kind] * GIB // 2)
        try:
            self._furnish(machine, MEMORY_GIB[kind])
        except RuntimeError:
            machine.stop()
            raise
        self.made[name], self.types[name], self._tags[name] = machine, kind, dict(tags)
        return name

    def _furnish(self, machine: Machine, memory_gib: int) -> None:
        """Makes it what the cloud's image makes of a machine."""
        public = self.key.with_suffix(".pub").read_text().strip()
        venv = BIN.parent.resolve()
        machine.run("install", "-D", HERE / "provider.py", f"{SDK}/namespaces.py")
        machine.run("bash", HERE / "image.sh", public, venv, SDK, memory_gib, KERNELS)

    @contextlib.contextmanager
    def open(self) -> Iterator[Cloud]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
