"""``serve-app usage``: what was used and what it cost, as a table with bars, JSON or CSV.

It reads the store itself, whether or not a server runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serve_app.cli.groups import add_command, can_show, open_store
from serve_app.config import load_settings
from serve_app.state.errors import StateError

# What rows can be by: a bucket of time, or something that work has.
TIMES = ("hour", "day", "month")
GROUPS = ("model", "key", "task", "account", "adapter", "batch", "status")
BAR, MIN_BAR = 24, 6
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# More rows than anybody reads.
MAX_ROWS = 10_000


def add_parser(commands: Any) -> None:
    usage = add_command(commands, "usage", "what was used and what it cost, by day, model or key")
    usage.add_argument("--by", choices=(*TIMES, *GROUPS), default="day", help="what the rows are (default day)")
    usage.add_argument("--since", default="30d", help="2026-11-22, 2026-11-22T06:00:00Z, or 36h, 7d, 2w (default 30d)")
    usage.add_argument("--until", help="the same (default now)")
    usage.add_argument("--account", help="only this account's (default all)")
    usage.add_argument("--model", help="only this model's")
    usage.add_argument("--key", help="only that of the key with this id")
    shapes = usage.add_mutually_exclusive_group()
    shapes.add_argument("--json", action="store_true", help="as JSON, as the API answers it")
    shapes.add_argument("--csv", action="store_true", help="as CSV")
    usage.set_defaults(command=_usage)


def _usage(arguments: argparse.Namespace) -> int:
    from serve_app.api.errors import ApiError
    from serve_app.gateway.usage.read import UsageRequest, bounded
    from serve_app.gateway.usage.write import render_csv, render_usage
    from serve_app.state.spending.ledger import DAY_S, HOUR_S
    from serve_app.state.spending.usage import Order, UsageQuery, Width

    now = time.time()
    widths: dict[str, Width] = {"hour": HOUR_S, "day": DAY_S, "month": "month"}
    timed = arguments.by in TIMES
    given = vars(arguments)
    only: dict[Any, tuple[str, ...]] = {name: (given[name],) for name in ("model", "key") if given[name]}
    since = _moment(arguments.since, "--since", now)
    width = widths.get(arguments.by)
    if isinstance(width, int):
        since -= since % width
    query = UsageQuery(
        since=since,
        until=int(now) + 1 if arguments.until is None else _moment(arguments.until, "--until", now),
        account=arguments.account,
        width=width,
        by=("currency",) if timed else (arguments.by, "currency"),
        only=only,
        order=(Order(),) if timed else (Order("neurons", True), Order("entries", True)),
        limit=MAX_ROWS,
    )
    settings = load_settings()
    with open_store(settings) as store:
        store.usage.entries_kept_s = settings.ledger_days * DAY_S
        try:
            page = store.usage.sums(bounded(query))
        except ApiError as wrong:
            raise StateError(wrong.message) from None
    asked = UsageRequest(query, arguments.by if timed else "none", 1, MAX_ROWS, arguments.csv)
    if arguments.csv:
        print(render_csv(asked, page), end="")
    elif arguments.json:
        print(json.dumps(render_usage(asked, page), indent=2))
    else:
        columns = shutil.get_terminal_size().columns
        print(table(page.rows, arguments.by, columns, blocks=can_show(_EIGHTHS)), end="")
        if page.total > len(page.rows):
            print(f"and {page.total - len(page.rows)} more; ask for less time", file=sys.stderr)
    return 0


def table(rows: Sequence[Any], by: str, columns: int, *, blocks: bool) -> str:
    """``rows`` (of :class:`~serve_app.state.spending.usage.UsageRow`) in lines of at most ``columns`` characters, with
    a bar for the neurons of each, or for its requests where nothing has a price.
    """
    from serve_app.gateway.usage.write import amount_text, time_text

    if not rows:
        return "Nothing was used in this time.\n"
    cut = {"hour": 16, "day": 10, "month": 7}.get(by)
    shown = [[by, "requests", "input", "cached", "output", "neurons", "cost"]]
    for row in (*rows, *_totals(rows)):
        name = "total" if row.at is None and by not in row.dimensions else ""
        name = name or (row.dimensions[by] or "-" if cut is None else time_text(row.at)[:cut].replace("T", " "))
        units = [f"{row.units.get(unit, 0):,}" for unit in ("input_tokens", "cached_tokens", "output_tokens")]
        cost = f"{amount_text(row.money)} {row.dimensions['currency']}" if row.money else "-"
        shown.append([name, f"{row.entries:,}", *units, f"{row.neurons / 1e6:,.2f}", cost])
    sizes = [max(map(len, column)) for column in zip(*shown, strict=True)]
    room = columns - sum(sizes) - 2 * len(sizes)
    priced = any(row.neurons for row in rows)
    measured = [row.neurons if priced else row.entries for row in rows]
    most, length = max(measured), min(room, BAR)
    lines = []
    for place, cells in enumerate(shown):
        text = "  ".join([cells[0].ljust(sizes[0]), *(c.rjust(s) for c, s in zip(cells[1:], sizes[1:], strict=True))])
        if length >= MIN_BAR and 0 < place <= len(rows) and most:
            text += "  " + bar(measured[place - 1] / most, length, blocks=blocks)
        lines.append(text.rstrip())
    return "\n".join(lines) + "\n"


def bar(share: float, length: int, *, blocks: bool) -> str:
    """``share`` of ``length`` characters; what is not nothing shows at least a little."""
    if not blocks:
        return "#" * max(round(share * length), share > 0)
    eighths = max(round(share * length * 8), share > 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _totals(rows: Sequence[Any]) -> list[Any]:
    """One for each currency."""
    from serve_app.gateway.usage.write import merged

    return list(merged([replace(r, at=None, dimensions={"currency": r.dimensions["currency"]}) for r in rows]))


def _moment(text: str, option: str, now: float) -> int:
    from serve_app.state.spending.usage import moment

    try:
        return moment(text, now)
    except ValueError as error:
        raise StateError(f"{option}: {error}") from None
