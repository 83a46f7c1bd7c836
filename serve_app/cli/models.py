"""``serve-app models``: the catalogue, and what an operator does with models while the server runs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from serve_app.cli.groups import add_command, served, show
from serve_app.client.server import Server, ServerError
from serve_app.config import load_settings

PROFILES = ("local", "gpu")
LOOK_S = 0.5
HOUR_S = 3600
# Within which every gateway has heard of a model that another one was told to start.
HEARD_S = 30.0
# What Serve calls an application of which nothing more is tried.
FAILED = ("deploy_failed",)
_ABOUT = """\
Without an action: lists the catalogue, whether or not a server runs. Actions are for the operator of the running
server. What they say is kept: it holds after a restart, and comes before --models.

examples:
  serve-app models --profile local                               what this machine could serve
  serve-app models list                                          every record, and which models run
  serve-app models add mine.yaml --start                         a record of one's own, checked, and its model started
  serve-app models start @cf/pico/pico-sentiment --wait          until it answers
  serve-app models scale @cf/pico/pico-instruct --replicas 2     or --min 1 --max 4, --stage prefill
  serve-app models stop @cf/pico/pico-sentiment
  serve-app models canary @cf/me/chat --to @cf/me/chat-v2 --percent 5    then --percent 50; compare; --end
"""


def add_parser(commands: Any) -> None:
    models = add_command(commands, "models", "list the catalogue; start, stop, scale, add and replace models", _ABOUT)
    models.add_argument("--profile", choices=PROFILES, help="only what this profile starts")
    models.add_argument("--ids", action="store_true", help="only ids")
    models.set_defaults(command=_catalogue)
    actions = models.add_subparsers(metavar="ACTION")

    def action(name: str, help: str, command: Any) -> argparse.ArgumentParser:
        parser = add_command(actions, name, help)
        parser.add_argument("--json", action="store_true", help="as JSON")
        parser.set_defaults(command=served(command))
        return parser

    action("list", "every record that the running server knows, and which models run", _list)
    start = action("start", "start a model", _start)
    start.add_argument("model", help="the model's id")
    _waits(start)
    stop = action("stop", "stop a model; it stays stopped after a restart", _stop)
    stop.add_argument("model", help="the model's id")
    scale = action("scale", "change how many workers a model has", _scale)
    scale.add_argument("model", help="the model's id")
    scale.add_argument("--replicas", type=int, metavar="N", help="so many, whatever the load")
    scale.add_argument("--min", type=int, metavar="N", help="at least so many")
    scale.add_argument("--max", type=int, metavar="N", help="at most so many")
    scale.add_argument("--stage", help="of this stage (default: the one that requests are sent to)")
    add = action("add", "add a record to the catalogue, with the checks of a start", _add)
    add.add_argument("file", type=Path, help="the record, YAML; - reads it from standard input")
    add.add_argument("--check", action="store_true", help="only check it")
    add.add_argument("--start", action="store_true", help="start its model as well")
    _waits(add)
    canary = action("canary", "send a share of a model's requests to another one, and compare them", _canary)
    canary.add_argument("model", help="the model's id")
    canary.add_argument("--to", metavar="MODEL", help="the one that answers the share, such as a new version")
    canary.add_argument("--percent", type=float, metavar="N", help="the share, 0 to 100")
    canary.add_argument("--end", action="store_true", help="the model answers all of its requests again")
    remove = action("remove", "remove a record that was added; weights stay where they are", _remove)
    remove.add_argument("model", help="the model's id")


def _waits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="end when the model answers")


def _catalogue(arguments: argparse.Namespace) -> int:
    from serve_app.catalog.load import load_catalog
    from serve_app.state.check import read_operated

    settings = load_settings()
    for record in load_catalog(settings.home, operated=read_operated(settings.home, settings.database)):
        if arguments.profile is None or arguments.profile in record.serving:
            profiles = ",".join(record.serving) or "-"
            print(record.id if arguments.ids else f"{record.id:48} {record.task:16} {profiles:10} {record.description}")
    return 0


def _list(arguments: argparse.Namespace, server: Server) -> int:
    found = _records(server)
    return show(found, arguments.json, "\n".join(described(one) for one in found))


def _start(arguments: argparse.Namespace, server: Server) -> int:
    found = _act(server, arguments.model, "start")
    if arguments.wait:
        found = _wait(server, arguments.model)
    return show(found, arguments.json, described(found))


def _stop(arguments: argparse.Namespace, server: Server) -> int:
    return show(_act(server, arguments.model, "stop"), arguments.json, f"{arguments.model} is stopped")


def _scale(arguments: argparse.Namespace, server: Server) -> int:
    names = {"replicas": "replicas", "min": "min_replicas", "max": "max_replicas", "stage": "stage"}
    asked = {to: given for name, to in names.items() if (given := getattr(arguments, name)) is not None}
    found = _act(server, arguments.model, "scale", **asked)
    return show(found, arguments.json, described(found))


def _add(arguments: argparse.Namespace, server: Server) -> int:
    text = sys.stdin.read() if str(arguments.file) == "-" else arguments.file.read_text(encoding="utf-8")
    starts = arguments.start and not arguments.check
    found = server.result("POST", f"{server.ai}/models/records", json={"record": text, "check": arguments.check})
    if not arguments.json or not starts:
        show(found, arguments.json, f"{found['model']} is {'a good record' if arguments.check else 'added'}")
    if not starts:
        return 0
    arguments.model = found["model"]
    return _start(arguments, server)


def _canary(arguments: argparse.Namespace, server: Server) -> int:
    model = arguments.model
    if arguments.end:
        record = _act(server, model, "canary", canary=None)
    elif arguments.to is not None or arguments.percent is not None:
        now = _record(server, model).get("canary") or {}
        to, percent = arguments.to or now.get("model"), arguments.percent
        if to is None or percent is None:
            raise ServerError(f"{model} has no canary yet: give --to MODEL and --percent N" if to is None else
                              "how much of the requests? Give --percent N", 400)  # fmt: skip
        record = _act(server, model, "canary", canary={"model": to, "percent": percent})
    else:
        record = _record(server, model)
    share = record["canary"]
    if share is None:
        return show({"canary": None, "compared": []}, arguments.json, f"{model} has no canary")
    compared = [_last_hour(server, one) for one in (model, share["model"])]
    return show({"canary": share, "compared": compared}, arguments.json, _compared(record, compared))


def _last_hour(server: Server, model: str) -> dict[str, Any]:
    """What the model has done in the hour at hand, and the one before where that is all there is."""
    asked = {"since": "1h", "step": HOUR_S, "model": model}
    points = server.ask("GET", "/v1/metrics/history", params=asked)["result"]
    return {"model": model, **(points[-1] if points else {"requests": 0})}


def _compared(record: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    share = record["canary"]
    away = "" if share["ready"] else ", which is not ready: it gets none"
    lines = [f"{share['percent']:g} % of {record['model']} go to {share['model']}{away}"]
    for row in rows:
        cells = [f"{row['model']:48}", f"{row['requests']:8} requests"]
        if row["requests"]:
            cells.append(f"{100 * row['errors'] / row['requests']:5.1f} % errors")
        for name, label in (("ttft", "first token"), ("itl", "gap")):
            if (found := row.get(name) or {}).get("p50") is not None:
                cells.append(f"{label} {1e3 * found['p50']:.0f} ms, p90 {1e3 * found['p90']:.0f} ms")
        lines.append("  ".join(cells))
    # Gateways write their history once a minute.
    return "\n".join([*lines, "of the last hour; what is less than a minute old may not be counted yet"])


def _remove(arguments: argparse.Namespace, server: Server) -> int:
    found = server.result("DELETE", f"{server.ai}/models/records/{arguments.model}")
    return show(found, arguments.json, f"{arguments.model} is removed")


def _act(server: Server, model: str, action: str, **more: Any) -> dict[str, Any]:
    """The model's record as the server has it then."""
    sent = {"model": model, "action": action, **more}
    return dict(server.result("POST", f"{server.ai}/models/actions", json=sent))


def _wait(server: Server, model: str) -> dict[str, Any]:
    """The record of a model that answers. What it does meanwhile is told to standard error. Raises `ServerError` for
    one that fails, or that somebody has stopped.
    """
    told, seen, began = "", False, time.monotonic()
    while True:
        found = next((one for one in _records(server) if one["model"] == model), None)
        if found is not None and found["started"]:
            seen = True
            if found["ready"]:
                return found
            if found["state"] in FAILED:
                raise ServerError(
                    f"{model} cannot be started: {found['problem'] or 'GET /health says how far it is'}", 503
                )
            if found["state"] != told:
                told = found["state"]
                print(f"{model}: {told.replace('_', ' ')}", file=sys.stderr, flush=True)
        elif seen or time.monotonic() - began > HEARD_S:
            raise ServerError(f"{model} was stopped while it started", 409)
        time.sleep(LOOK_S)


def _record(server: Server, model: str) -> dict[str, Any]:
    """Raises `ServerError` for one that there is not."""
    found = next((one for one in _records(server) if one["model"] == model), None)
    if found is None:
        raise ServerError(f"there is no model {model}; serve-app models list shows them", 404)
    return found


def _records(server: Server) -> list[dict[str, Any]]:
    return list(server.result("GET", f"{server.ai}/models/records"))


def described(record: dict[str, Any]) -> str:
    """A line for people."""
    state = "ready" if record["ready"] else record["state"].replace("_", " ")
    bounds = record["stages"] if record["started"] else {}
    workers = [f"{name} {_bounds(**each)}" for name, each in bounds.items()]
    cells = (f"{record['model']:48}", f"{state:12}", ", ".join(workers), "added" if record["source"] == "added" else "")
    line = "  ".join(cell for cell in cells if cell).rstrip()
    if (share := record["canary"]) is not None:
        line += f"\n  {share['percent']:g} % of its requests go to {share['model']}"
    return line + (f"\n  {record['problem']}" if record["problem"] else "")


def _bounds(min_replicas: int, max_replicas: int) -> str:
    return str(min_replicas) if min_replicas == max_replicas else f"{min_replicas}-{max_replicas}"
