"""Batches, in parts:

* ``order``: prompt tokens that an engine with a bounded cache computes, in the order of the file and in that of the
  intake, for a seeded file of mixed shared prefixes;
* ``beside``: p99 to the first token and between tokens of seeded real-time streams on an engine, beside batch requests
  over without, in turn;
* ``modelled``: the same streams and the engine's scheduler, in modelled time: no noise, and nothing of what steps
  really take;
* ``polls``: how long the store takes to find one of many finished batches;
* ``intake``: lines a second and memory of checking, ordering and cutting a file;
* ``inline``: how long a gateway takes for 10 MB in one body, by API and length of requests, and for refusals;
* ``offline``: tokens per second of a batch of short requests through the whole server, over those of its engine alone,
  in turn. It starts a server, and runs only if it is named.

``python -m benchmarks batch [--parts order,beside,...] [--json]``. What misses its target says so. Every answer is
checked, and one that is wrong ends the benchmark without a figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.batch import beside, inline, intake, modelled, offline, order, polls
from benchmarks.checks import Checks

Figures = dict[str, Any]


def misses(part: str, found: Figures) -> list[str]:
    """What of a part's figures is not as good as it is meant to be."""
    wanted: dict[str, list[tuple[bool, str]]] = {
        "order": [(found.get("gain", 0) >= order.LEAST_GAIN, f"gain is meant to be {order.LEAST_GAIN}")],
        "intake": [
            (found.get("more_mb", 0) <= intake.MOST_MB, f"more_mb is meant to be at most {intake.MOST_MB}"),
            (found.get("lines_per_s", 0) >= intake.LEAST_LINES, f"lines_per_s is meant to be {intake.LEAST_LINES}"),
        ],
        "polls": [
            (found.get("poll_p99_ms", 0) <= polls.MOST_MS, f"poll_p99_ms is meant to be at most {polls.MOST_MS}")
        ],
        "inline": [(found.get("most_s", 0) <= inline.MOST_S, f"most_s is meant to be at most {inline.MOST_S}")],
        "offline": [(found.get("share", 0) >= offline.LEAST_SHARE, f"share is meant to be {offline.LEAST_SHARE}")],
    }
    for growth in ("ttft_p99_growth", "itl_p99_growth"):
        limit = f"{growth} is meant to be at most {beside.MOST_GROWTH}"
        for measured in ("beside", "modelled"):
            wanted.setdefault(measured, []).append((found.get(growth, 0) <= beside.MOST_GROWTH, limit))
    return [f"{part}: misses the target: {told}" for good, told in wanted.get(part, []) if not good]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default="order,beside,modelled,polls,intake,inline", help="which, separated by commas"
    )
    parser.add_argument("--requests", type=int, default=1000, help="of a file (order), of a batch (offline)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round and side of real-time streams")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the file for the intake")
    parser.add_argument(
        "--model", choices=offline.MODELS, default=offline.PICO, help="of offline; random but for the first"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the engine of offline")
    parser.add_argument("--batches", type=int, default=100_000, help="finished ones, of polls")
    parser.add_argument("--bytes", type=int, default=inline.BYTES, help="of a body, of inline")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    checks = Checks()
    parts: dict[str, Callable[[], Figures]] = {
        "order": lambda: order.prefix_order(arguments.requests, checks),
        "beside": lambda: beside.beside(arguments.seconds, arguments.rounds, checks),
        "intake": lambda: intake.intake(arguments.lines, checks),
        "modelled": lambda: modelled.modelled(arguments.rounds, checks),
        "polls": lambda: polls.polls(arguments.batches, checks),
        "inline": lambda: inline.inline(arguments.bytes, checks),
        "offline": lambda: offline.offline(
            arguments.requests, arguments.model, arguments.threads, arguments.rounds, checks
        ),
    }
    asked = arguments.parts.split(",")
    if unknown := [part for part in asked if part not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}; parts are {', '.join(parts)}")
    found = {part: parts[part]() for part in asked}
    right = checks.require()
    missed = [told for part in asked for told in misses(part, found[part])]
    for part in asked:
        print(f"{part}: " + ", ".join(f"{name} {value}" for name, value in found[part].items()))
    print("\n".join(missed) or "every target is met")
    if arguments.json:
        print(json.dumps({"benchmark": "batch", "answers": right, **found, "missed": missed}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
