"""``serve-app serve``: start, show how loading goes, say how to call it, wait, and end everything on Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from serve_app import logs, small_machine
from serve_app.catalog.load import Catalog, load_catalog
from serve_app.catalog.need import unfit
from serve_app.catalog.price_file import PriceFile
from serve_app.catalog.records import ModelRecord
from serve_app.catalog.tasks import declared
from serve_app.cluster import LocalCluster
from serve_app.config import ConfigError, Settings, api_key
from serve_app.dashboard_command import link
from serve_app.run_directory import remove_leftovers
from serve_app.state.check import check as check_store
from serve_app.state.check import read_operated

# How often it is asked whether Ray still lives.
WATCH_S = 0.5
# A start of which nothing has been heard for so long is said to go on.
QUIET_S = 15.0


class Progress:
    """Says how a start goes, and while it is entered also that it still does."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._began = self._said = time.monotonic()
        self._over = threading.Event()

    def __call__(self, line: str) -> None:
        self._said = time.monotonic()
        _tell(f"  {self._said - self._began:5.1f} s  {line}")

    def __enter__(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._go_on, name="progress", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._over.wait(self._quiet_s / 10):
            if time.monotonic() - self._said > self._quiet_s:
                cores = small_machine.usable_cores()
                self(f"still starting; the machine's load is {os.getloadavg()[0]:.0f} on {cores} cores")


def _tell(text: str, level: int = logging.INFO) -> None:
    """What this process says, which is its log."""
    logs.write("serve", text, sys.stdout if level == logging.INFO else sys.stderr, level)


def serve_until_interrupted(settings: Settings) -> int:
    """Blocks until SIGINT or SIGTERM, or until Ray is lost. Returns the exit status, 0 where it was asked to end."""
    stop = threading.Event()
    say = Progress()
    os.environ["SERVE_APP_LOG"] = settings.log
    logs.set_up("serve")
    for warning in settings.warnings:
        _tell(f"serve-app: warning: {warning}", logging.WARNING)
    remove_leftovers()
    _refuse_taken_port(settings)
    # A wrong record or price stops us here, before Ray starts.
    check_store(settings.home, settings.database)
    catalog = load_catalog(settings.home, operated=read_operated(settings.home, settings.database))
    PriceFile(settings.home, settings.prices).read()
    started = [record for record, _ in catalog.started(settings.profile, settings.models)]
    _check_memory(settings, catalog)
    for line in small_machine.warnings(settings, catalog):
        _tell(f"serve-app: warning: {line}", logging.WARNING)
    for model, problem in catalog.problems.items():
        _tell(f"serve-app: warning: {model}, as it was said by hand: {problem}", logging.WARNING)
    key = api_key(settings)
    _tell(f"serve-app: starting (profile {settings.profile}, state in {settings.home})")
    cluster = LocalCluster(settings, say, catalog)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_watch, args=(cluster,), name="watch-ray", daemon=True).start()
    try:
        try:
            with say:
                cluster.start()
        except Exception as error:
            if stop.is_set():
                return 0
            # On a machine with too little of something, whatever part it is that gives up first.
            _tell(
                f"serve-app: the start failed ({type(error).__name__}: {str(error)[-500:]}). Is the machine short of "
                "memory or very busy? Start again; SERVE_APP_MODELS starts fewer models.",
                logging.ERROR,
            )
            return 1
        # Ray installs handlers of its own while it starts.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        if not stop.is_set():
            url = f"http://{'127.0.0.1' if settings.is_loopback else settings.host}:{settings.port}"
            with say:
                ready = _wait_ready(url, cluster, say, stop)
            if ready:
                # A log holds no key; whoever reads one has the key elsewhere.
                _tell(f"serve-app: ready at {url}" if logs.as_json() else _how_to_call(url, settings, key, started))
            while not stop.wait(1.0):
                pass
        _tell("\nserve-app: ending everything it started")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        cluster.stop()
    return 0


def _watch(cluster: LocalCluster) -> None:
    """Ends this process, and everything it started, once Ray has lost one of its daemons: nothing could be served, and
    calls into Ray would wait for minutes. Who started us (systemd, a person) sees the status and starts again.
    """
    while (problem := cluster.problem()) is None:
        time.sleep(WATCH_S)
    _tell(f"\nserve-app: {problem}; ending. Its logs are in {cluster.lost_logs}.", logging.ERROR)
    cluster.stop()
    os._exit(1)


def _check_memory(settings: Settings, catalog: Catalog) -> None:
    """Raises ConfigError for models that never sleep and are too large together, and warns of others."""
    if not settings.memory_budget:
        return
    started = [(r, profile, catalog.source(r.id)) for r, profile in catalog.started(settings.profile, settings.models)]
    for model, problem in unfit(started, settings.home, settings.memory_budget).items():
        if any(stage.min_replicas for r, profile, _ in started if r.id == model for stage in profile.stages.values()):
            raise ConfigError(f"{problem}.")
        _tell(f"serve-app: warning: {problem}", logging.WARNING)


def _refuse_taken_port(settings: Settings) -> None:
    import socket

    family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"port {settings.port} on {settings.host} can't be used ({error.strerror}). "
                "Choose another: PORT=8001 make serve"
            ) from None


def _wait_ready(url: str, cluster: LocalCluster, say: Any, stop: threading.Event) -> bool:
    """Shows every change of ``GET /health`` until all models are ready. False: interrupted."""
    seen: dict[str, str] = {}
    ready: set[str] = set()
    while not stop.is_set():
        report = _health(url)
        for model, state in (report or {}).get("models", {}).items():
            if state["ready"] and model not in ready:
                ready.add(model)
                say(f"{model} is ready")
            for stage, progress in state.get("stages", {}).items():
                label, step = f"{model} {stage}", progress["step"]
                if seen.get(label) != step:
                    seen[label] = step
                    say(f"{label}: {step}")
            if state.get("message") and seen.get(model) != state["message"]:
                seen[model] = state["message"]
                if state.get("state") in ("deploy_failed", "unhealthy"):
                    say(f"{model}: {state['message']}")
        if report is not None and all(m["ready"] or m.get("state") == "waiting" for m in report["models"].values()):
            cluster.deploy_rest()
        if report is not None and report["status"] == "ready":
            return True
        stop.wait(0.25)
    return False


def _health(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            body = json.load(error)
        except ValueError:
            return None
        return body if "models" in body else None
    except (OSError, ValueError):
        return None


def _how_to_call(url: str, settings: Settings, key: str, started: list[ModelRecord]) -> str:
    # The first task that is served gives the example.
    by_task = {record.task: record.id for record in reversed(started)}
    task = next(task for task in declared().values() if task.name in by_task)
    base = f"{url}/client/v4/accounts/{settings.account_id}/ai"
    return f"""
serve-app: ready

  base URL    {base}   (OpenAI clients: {url}/v1)
  account id  {settings.account_id}
  API key     {key}
  dashboard   {link(url, settings)}   (signs in once; `serve-app dashboard` prints another)

  curl {base}/run/{by_task[task.name]} \\
    -H "Authorization: Bearer {key}" \\
    -d '{json.dumps(task.example)}'

  Ctrl-C ends it.
"""
