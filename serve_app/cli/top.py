"""``serve-app top``: a live table of models, workers and queues."""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from serve_app.cli.groups import add_command, served
from serve_app.client.server import Server, ServerError
from serve_app.client.view import ModelView, View, look

if TYPE_CHECKING:
    from rich.table import Table

# For one table: how long rates are measured.
ONCE_S = 1.0
# Columns of words; the others hold numbers.
_WORDS = ("model", "state", "waiting", "worker", "stage", "role", "batch runner")
_ABOUT = """\
Shows the running server's models, workers with role and load, requests that wait by account, tokens per second and use
of the KV cache, again each second. q or Ctrl-C ends it. Into a pipe it writes plain tables, with --json one JSON object
a line.
"""


def add_parser(commands: Any) -> None:
    top = add_command(commands, "top", "a live table of models, workers and queues", _ABOUT)
    top.add_argument("--once", action="store_true", help="show it once")
    top.add_argument("--json", action="store_true", help="as JSON, one object a line")
    top.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (default 1)")
    top.set_defaults(command=served(_top))


def _top(arguments: argparse.Namespace, server: Server) -> int:
    every = max(0.1, arguments.every)
    views = _views(server)
    first = next(views)
    if arguments.once or arguments.json or not sys.stdout.isatty():
        while True:
            time.sleep(min(every, ONCE_S) if arguments.once else every)
            first = next(views)
            print(json.dumps(first.shown()) if arguments.json else plain(first, server), flush=True)
            if arguments.once:
                return 0
    return _live(server, views, first, every)


def _views(server: Server) -> Iterator[View]:
    """What is found at each look."""
    before, at = None, 0.0
    while True:
        status, now = server.ask("GET", "/v1/status", timeout=10), time.monotonic()
        yield look(status, before, now - at)
        before, at = status, now


def _live(server: Server, views: Iterator[View], view: View, every: float) -> int:
    from rich.console import Group as Stack
    from rich.live import Live
    from rich.text import Text

    trouble = ""
    with _keys() as pressed, Live(auto_refresh=False, screen=True) as live:
        while True:
            title = Text(f"serve-app top  {server.http.base_url}  {time.strftime('%H:%M:%S')}  q ends", style="bold")
            said = Text(trouble or view.problem, style="red")
            live.update(Stack(title, said, *tables(view)), refresh=True)
            try:
                if pressed(every) in ("q", "Q", "\x03", "\x04"):
                    return 0
                view, trouble = next(views), ""
            except KeyboardInterrupt:
                return 0
            except ServerError as error:
                # The server may be starting again; what was seen stays.
                trouble, views = str(error), _views(server)


def rows(view: View) -> dict[str, list[list[str]]]:
    """Tables by name; the first row has the names of the columns."""
    models = [["model", "state", "in flight", "waiting", "tokens/s", "prompt/s", "cached/s"]]
    workers = [["model", "worker", "stage", "role", "running", "waiting", "queued tokens", "KV", "step ms"]]
    for model in view.models:
        models.append(_model_cells(model))
        for worker in model.workers:
            kv = "-" if worker.kv_use is None else f"{worker.kv_use:.0%}"
            step = "-" if worker.step_ms is None else f"{worker.step_ms:.1f}"
            counts = map(str, (worker.running, worker.waiting, worker.queued_tokens))
            workers.append([model.id, worker.name, worker.stage, worker.role, *counts, kv, step])
    found = {"models": models, "workers": workers}
    if view.runners:
        runners = [["model", "batch runner", "running"]]
        runners += [[model, one.name, str(count)] for one in view.runners for model, count in one.models.items()]
        found["runners"] = runners
    return found


def tables(view: View) -> list[Table]:
    """For a terminal."""
    from rich.table import Table
    from rich.text import Text

    found = []
    for name, (titles, *cells) in rows(view).items():
        table = Table(title=name, title_justify="left", expand=True)
        for title in titles:
            table.add_column(title, justify="left" if title in _WORDS else "right")
        for row in cells:
            table.add_row(*map(Text, row))
        found.append(table)
    return found


def _model_cells(model: ModelView) -> list[str]:
    state = "ready" if model.ready else "not ready"
    state += f" ({', '.join(model.silent)} silent)" if model.silent else ""
    waiting = ", ".join(f"{who} {count}" for who, count in sorted(model.waiting.items(), key=lambda each: -each[1])[:5])
    rates = (model.tokens_per_s, model.prompt_tokens_per_s, model.cached_per_s)
    return [model.id, state, str(model.in_flight), waiting or "-", *("-" if r is None else f"{r:,.1f}" for r in rates)]


def plain(view: View, server: Server) -> str:
    """The tables without colours and lines, for a pipe."""
    lines = [f"{server.http.base_url}  {time.strftime('%H:%M:%S')}  {view.problem}".rstrip()]
    for cells in rows(view).values():
        sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", *("  ".join(c.ljust(s) for c, s in zip(row, sizes, strict=True)).rstrip() for row in cells)]
    return "\n".join(lines) + "\n"


@contextmanager
def _keys() -> Iterator[Any]:
    """``pressed(seconds)``: a key, as soon as it is pressed; "" for none in that time."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(number)
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
