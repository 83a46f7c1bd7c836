"""The server that faults are injected into: its processes by what they do, its files, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.asks import TOP
from benchmarks.chaos.clock import Clock
from benchmarks.chaos.dialects import Seen
from benchmarks.chaos.ledger import Told
from benchmarks.chaos.network import Proxy, listener
from benchmarks.serving.postgresql import Server as Postgresql
from benchmarks.serving.processes import born, descendants, name_of
from benchmarks.serving.stack import Server
from benchmarks.serving.startup import MODEL, all_ready

GATEWAY = "ray::ServeReplica:gateway:Gateway"
RUNNER = "ray::ServeReplica:gateway:Batch"
REPLICA = "ray::ServeReplica:cf--"
WORKERS = ("ray::EngineWorker", "ray::EncoderWorker", "ray::DraftWorker", "ray::PredictorWorker")
DECODERS = tuple(
    f"{python} -P -m serve_app.media.program" for python in ("python", "python3", Path(sys.executable).name)
)
END_S = 10.0  # a server that has lost its Ray says so and ends
ENDING_S = 60.0  # a machine that is busy with other things may keep it from that for so long
GONE_S = 10.0  # what a server leaves, until its keeper has ended it


@dataclass(slots=True)
class Target:
    """``server`` is None for one that runs already, which cannot be started again. ``seen``: every process that was
    below it, with when it was started, so that no other of the same number is taken for it; ``folders``: its
    sockets'. ``postgresql``: one that was started for this run. ``told``: what was asked by hand. ``clock``: what
    its processes take for the time of day, where that can be moved.
    """

    url: str
    key: str
    home: Path
    pid: int
    server: Server | None = None
    store: Proxy | None = None
    seen: dict[tuple[int, str], str] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    temporary: Path | None = None
    postgresql: Postgresql | None = None
    gateways: int = 1
    told: list[Told] = field(default_factory=list)
    clock: Clock | None = None

    def named(self, *prefixes: str) -> list[int]:
        """Its processes whose names begin so."""
        return named(self.pid, *prefixes)

    def workers(self, stage: str) -> list[int]:
        """Processes of one stage's workers of the chat model, as the gateway knows them; none while it is not ready."""
        told = self.ask("GET", "/v1/status")["models"][MODEL].get("workers", [])
        return [worker["pid"] for worker in told if worker["stage"] == stage]

    def owner(self) -> list[int]:
        """The gateway that owns the dispatch of the chat model, and not the other ones; none while that is open."""
        told = str(self.ask("GET", "/v1/status")["models"][MODEL]["routing"]["owner"])
        found = listener(self.named(GATEWAY), int(told.rpartition(":")[2]))
        return [] if found is None else [found]

    def run(self, model: str, body: Any) -> Any:
        """Asks a model as its operator does; the ledger is held against that as well. Raises :class:`OSError`."""
        seen = Seen()
        self.told.append(Told("by hand", seen, None, model))
        return self.ask("POST", f"{TOP}/ai/run/{model}", body, seen)

    def ask(self, method: str, path: str, body: Any = None, seen: Seen | None = None) -> Any:
        """``seen`` gets what is told of the request. Raises :class:`OSError`, of which the error of an HTTP status is
        one.
        """
        seen = Seen() if seen is None else seen
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                seen.request = answer.headers.get("cf-ray", "")
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            seen.request, seen.refused = error.headers.get("cf-ray", ""), True
            raise
        seen.finished = True
        return found

    def look(self) -> None:
        """Remembers which processes and folders there are."""
        for pid in descendants(self.pid):
            if (since := born(pid)) is not None:
                self.seen[pid, since] = _safe_name(pid)
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is there while the server runs
            logs = Path(json.loads((self.home / "run" / "cluster.json").read_text())["logs"])
            self.folders.update(folder for folder in logs.parents if folder.name.startswith("serve-app-"))

    def left(self) -> list[str]:
        """Names of what it has left behind: processes, the folder of its sockets, temporary files of any kind. Waits
        for some seconds.
        """
        until = time.monotonic() + GONE_S
        while True:
            alive = [name for (pid, since), name in self.seen.items() if born(pid) == since]
            folders = {str(folder) for folder in self.folders if folder.exists()}
            folders.update(map(str, self.temporary.iterdir() if self.temporary is not None else ()))
            if not (alive or folders) or time.monotonic() > until:
                return alive + sorted(folders)
            time.sleep(0.1)

    def busy(self) -> dict[str, int]:
        """Places and requests that are still held, as the gateway and the workers say."""
        # Each gateway tells of its own, and whichever is reached answers.
        every = [self.ask("GET", "/v1/status")["models"] for _ in range(1 if self.gateways == 1 else 4 * self.gateways)]
        held: dict[str, int] = {}
        for model, found in ((model, found) for told in every for model, found in told.items()):
            held[f"{model}: in flight"] = max(held.get(f"{model}: in flight", 0), found.get("inflight", 0))
            for worker in found.get("workers", ()):
                held[f"{model}: running in {worker.get('stage')} {worker.get('pid')}"] = worker.get("running", 0)
                held[f"{model}: waiting in {worker.get('stage')} {worker.get('pid')}"] = worker.get("waiting", 0)
        return {name: count for name, count in held.items() if isinstance(count, int) and count}

    def stop(self) -> list[str]:
        """Ends it as Ctrl-C does; what is wrong with its end."""
        assert self.server is not None
        self.look()
        code = self.server.stop()
        wrong = [f"it ended with status {code}"] if code else []
        return wrong + [f"left behind: {name}" for name in self.left()]

    def start_again(self) -> list[str]:
        """As systemd does after a failure, once it has ended by itself; returns when all models are ready, with what an
        operator would have had to mend.
        """
        assert self.server is not None
        since = time.monotonic()
        code = self.server.wait(ENDING_S)
        if (took := time.monotonic() - since) > END_S:
            print(f"           ended after {took:.1f} s", file=sys.stderr, flush=True)
        wrong = []
        if not code:
            wrong.append(f"the server {'goes on' if code is None else 'ended with status 0'} without its Ray")
            self.server.stop()
        wrong += [f"left behind: {name}" for name in self.left()]
        self.seen.clear()
        self.folders.clear()
        self.server.start()
        self.pid = self.server.pid
        return wrong

    def wait_ready(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not all_ready(self.url):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True


def named(server: int, *prefixes: str) -> list[int]:
    """Processes below one whose names begin so."""
    return [pid for pid in descendants(server) if _safe_name(pid).startswith(prefixes)]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _safe_name(pid: int) -> str:
    try:
        return name_of(pid)
    except (OSError, UnicodeDecodeError):
        return ""
