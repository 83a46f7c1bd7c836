"""``serve-app status``: the running server's models and workers, in lines for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from serve_app.cli.groups import add_command, served
from serve_app.client.server import Server
from serve_app.client.view import View, look

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
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    view = look(found)
    print(described(view, str(server.http.base_url)))
    return 0 if view.ready else 1


def described(view: View, url: str) -> str:
    """Lines for people."""
    ready = sum(model.ready for model in view.models)
    lines = [f"{url}  {ready} of {len(view.models)} models ready"]
    if view.problem:
        lines.append(f"problem: {view.problem}")
    for model in view.models:
        told = ["ready" if model.ready else "not ready", f"{model.in_flight} in flight"]
        lines += ["", f"{model.id}  {', '.join(told)}"]
        lines += [f"  {account}: {count} waiting" for account, count in model.waiting.items()]
        lines += [f"  {stage}: a worker is silent; it is being replaced or held up" for stage in model.silent]
        for worker in model.workers:
            kv = "" if worker.kv_use is None else f"  KV {worker.kv_use:.0%}"
            role = f"as {worker.role}" if worker.role != worker.stage else ""
            lines.append(
                f"  {worker.stage:10} {role:12} {worker.running} running, {worker.waiting} waiting{kv}  {worker.name}"
            )
    for node in view.memory:
        lines += ["", f"memory  {_mib(node.held)} held, {_mib(node.reserved)} reserved of {_mib(node.budget)}"]
        for name, stage, state, held, why in node.workers:
            lines.append(f"  {name} {stage}  {state}, {_mib(held)}" + (f"  ({why})" if why else ""))
    if view.runners:
        lines += ["", "batch runners"]
        lines += [f"  {one.name}  {one.running} running: {_by_model(one.models)}" for one in view.runners]
    return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _by_model(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{model} {count}" for model, count in sorted(counts.items())) or "nothing"
