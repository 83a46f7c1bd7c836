"""``serve-app status``: the running server's models and workers, in lines for people or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from serve_app.cli.groups import add_command, served
from serve_app.client.server import Server

_ABOUT = """\
Shows whether the running server is ready, and each model with its workers and queues. `serve-app top` shows it live.
--json prints what GET /v1/status answers. Ends with status 1 where a model is not ready.
"""


def add_parser(commands: Any) -> None:
    status = add_command(commands, "status", "show the running server's models and workers", _ABOUT)
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(command=served(_status))


def _status(arguments: argparse.Namespace, server: Server) -> int:
    found = server.ask("GET", "/v1/status")
    print(json.dumps(found, indent=2) if arguments.json else described(found, str(server.http.base_url)))
    return 0 if arguments.json or all(model["ready"] for model in found["models"].values()) else 1


def described(status: dict[str, Any], url: str) -> str:
    """Lines for people."""
    models = status["models"]
    ready = sum(model["ready"] for model in models.values())
    lines = [f"{url}  {ready} of {len(models)} models ready"]
    if gateway := status.get("gateway"):
        lines += _gateway(gateway)
    for name, model in models.items():
        lines += ["", *_model(name, model)]
    return "\n".join(lines)


def _gateway(gateway: dict[str, Any]) -> list[str]:
    store = gateway["store"]
    said = "store: reachable" if store.get("reachable", True) else f"store: away, {store.get('why', 'unknown')}"
    lines = [said]
    if problem := gateway["prices"]["problem"]:
        lines.append(f"prices: {problem}")
    return lines


def _model(name: str, model: dict[str, Any]) -> list[str]:
    routing = model.get("routing") or {}
    queued = sum((routing.get("waiting") or model.get("waiting") or {}).values())
    told = ["ready" if model["ready"] else "not ready"]
    if inflight := model.get("inflight"):
        told.append(f"{inflight} in flight")
    if queued:
        told.append(f"{queued} waiting")
    lines = [f"{name}  {', '.join(told)}"]
    lines += [f"  {account}: {count} waiting" for account, count in (routing.get("waiting") or {}).items() if count]
    for stage in model.get("silent") or ():
        lines.append(f"  {stage}: a worker is silent; it is being replaced or held up")
    for worker in model.get("workers") or ():
        lines.append(f"  {_worker(worker)}")
    return lines


def _worker(worker: dict[str, Any]) -> str:
    told = [f"{worker['stage']:10} process {worker['pid']}"]
    if "running" in worker:
        told.append(f"{worker['running']} running, {worker.get('waiting', 0)} waiting")
    if total := worker.get("total_blocks"):
        told.append(f"KV {worker['used_blocks'] / total:.0%} of {total} blocks")
    return "  ".join(told)
