"""Usage as ``GET .../ai/usage`` answers it, in JSON and as CSV, and single entries, the receipts of requests."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from serve_app.api.envelopes import success
from serve_app.api.receipt import MICRO, NANO, amount_text
from serve_app.catalog.pricing import UNIT_NAMES
from serve_app.gateway.usage.outliers import SHARE, Outlier, OutlierRequest
from serve_app.gateway.usage.read import UsageRequest
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.usage import UsagePage, UsageRow


def render_usage(asked: UsageRequest, page: UsagePage) -> dict[str, Any]:
    info = {
        "page": asked.page,
        "per_page": asked.per_page,
        "count": len(page.rows),
        "total_count": page.total,
        "since": time_text(page.since),
        "until": time_text(page.until),
        "interval": asked.interval,
    }
    return success([_row(row) for row in page.rows], result_info=info)


def render_csv(asked: UsageRequest, page: UsagePage) -> str:
    """A line a row, with a column for each unit that some row has. Neurons and money are decimals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    by = [name for name in asked.query.by if name != "currency"]
    units = [name for name in UNIT_NAMES if any(name in row.units for row in page.rows)]
    timed = [] if asked.query.width is None else ["time"]
    writer.writerow([*timed, *by, "requests", "seconds", *units, "neurons", "cost", "currency"])
    for row in page.rows:
        counts = [row.units.get(name, 0) for name in units]
        plain = [row.dimensions[name] for name in by]
        writer.writerow([*([] if row.at is None else [time_text(row.at)]), *plain, row.entries, round(row.seconds, 3),
                         *counts, amount_text(row.neurons, MICRO), amount_text(row.money, NANO),
                         row.dimensions["currency"]])  # fmt: skip
    return text.getvalue()


def render_entry(entries: Sequence[Entry]) -> dict[str, Any]:
    """The receipt of one request. One with several prompts has several entries, which are its ``parts``."""
    first = entries[0]
    units: dict[str, int] = {}
    for entry in entries:
        for name, count in entry.units.items():
            units[name] = units.get(name, 0) + count
    shown = _entry(first) | {
        "seconds": round(max(entry.seconds for entry in entries), 6),
        "units": units,
        "neurons": sum(entry.neurons for entry in entries) / MICRO,
        "cost": _cost(sum(entry.money for entry in entries), first.currency),
    }
    return success(shown | ({"parts": [_entry(entry) for entry in entries]} if len(entries) > 1 else {}))


def render_outliers(asked: OutlierRequest, found: Sequence[Outlier]) -> dict[str, Any]:
    info = {"count": len(found), "since": time_text(asked.first), "until": time_text(asked.today), "share": SHARE}
    shown = [
        {
            "time": time_text(one.at),
            "account": one.account,
            "group": one.group,
            "name": one.name,
            "neurons": one.neurons / MICRO,
            "usual": round(one.usual) / MICRO,
            "ratio": round(one.ratio, 4),
        }
        for one in found
    ]
    return success(shown, result_info=info)


def time_text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _row(row: UsageRow) -> dict[str, Any]:
    return {
        **({} if row.at is None else {"time": time_text(row.at)}),
        **{name: value for name, value in row.dimensions.items() if name != "currency"},
        "requests": row.entries,
        "seconds": round(row.seconds, 6),
        "units": dict(row.units),
        "neurons": row.neurons / MICRO,
        "cost": _cost(row.money, row.dimensions["currency"]),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    plain = ("id", "account", "key", "model", "task", "adapter", "batch", "status")
    return {
        **{name: getattr(entry, name) for name in plain},
        "time": datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "seconds": round(entry.seconds, 6),
        "units": dict(entry.units),
        "neurons": entry.neurons / MICRO,
        "cost": _cost(entry.money, entry.currency),
    }


def _cost(money: int, currency: str) -> dict[str, Any]:
    return {"amount": amount_text(money, NANO), "currency": currency}


def merged(rows: Sequence[UsageRow]) -> Iterator[UsageRow]:
    """Rows with one row for each time and set of dimensions, in their first order."""
    found: dict[tuple[Any, ...], list[UsageRow]] = {}
    for row in rows:
        found.setdefault((row.at, *row.dimensions.items()), []).append(row)
    for same in found.values():
        units: dict[str, int] = {}
        for row in same:
            for name, count in row.units.items():
                units[name] = units.get(name, 0) + count
        first = same[0]
        yield UsageRow(
            first.at,
            first.dimensions,
            sum(row.entries for row in same),
            sum(row.seconds for row in same),
            units,
            sum(row.neurons for row in same),
            sum(row.money for row in same),
        )
