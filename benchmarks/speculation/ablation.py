"""What each term of the speculation controller earns: speed beside plain decoding, with all terms and without each.

    python -m benchmarks ablation [--terms debt,fade] [--costs recorded,cliff] [--sides ngram+draft] [--jobs 2] [--json]

A SIMULATION (``replay.py``): the product's scheduler, look-up and controller run for real over recorded answers and
recorded drafts of the shipped pico models; the clock is simulated, so that figures do not depend on the machine.
``recorded`` costs were measured with those models (``record.py``, which makes ``recorded.json`` anew); the others are
assumed: ``weights`` (a large model that reads its weights), ``rows`` (a processor without room to spare), ``ahead`` (a
step that looks for drafts cannot be run ahead), ``cliff`` (far slower beyond two rows a request).

Texts: ``prose``, which nobody foresees; ``code``, ``tools``, ``edit``; ``mixed``, one of each in every batch;
``phases``, one after the other. A ratio is plain decoding's time over speculation's, learning included. A term's effect
is the geometric mean of its ratios over those with all terms, in percent; single cells differ by several percent by
chance.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import Any

from benchmarks.speculation.replay import Costs, Text, load, replay
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.policy import Policy

# Each term, at the value at which it has no effect.
TERMS: dict[str, dict[str, Any]] = {
    "debt": {"debt": math.inf},
    "credit": {"credit": 0.0},
    "own_budgets": {"own_budgets": False},
    "refresh": {"refresh": 0},
    "retry": {"retry": 0},
    "fade": {"fade": 1.0},
    "own_weight": {"own_weight": math.inf},
    "grades": {"grades": False},
    "replace_below": {"replace_below": math.inf},
    "cost_curve": {"cost_curve": False},
}
ALL = "all terms"
# Answers by batch size.
ANSWERS = {1: 6, 4: 16, 16: 48}
PHASES = ("prose", "code", "prose", "tools", "edit")
# What is promised: prose, which nobody foresees, at every batch size.
LEAST = 0.99

# (costs, proposers, text, batch)
Cell = tuple[str, str, str, int]


def texts_of(kinds: dict[str, list[Text]], kind: str, count: int) -> list[Text]:
    if kind == "mixed":
        found = [text for group in zip(*kinds.values(), strict=True) for text in group]
    elif kind == "phases":
        found = [text for name in PHASES for text in kinds[name][: max(2, count // 4)]]
    else:
        found = kinds[kind]
    return (found * 3)[: len(found) if kind == "phases" else count]


@cache
def recorded() -> tuple[dict[str, list[Text]], dict[str, Costs]]:
    return load()


@cache
def plain_seconds(costs: str, kind: str, batch: int) -> float:
    kinds, every = recorded()
    return replay(texts_of(kinds, kind, ANSWERS[batch]), batch, every[costs], [], None).seconds


def ratios(policy: dict[str, Any], cells: list[Cell]) -> list[float]:
    """Plain decoding's time over that with a controller of this policy, for each cell."""
    kinds, costs = recorded()
    found = []
    for name, side, kind, batch in cells:
        texts = texts_of(kinds, kind, ANSWERS[batch])
        drafted = replay(texts, batch, costs[name], side.split("+"), SpeculationController(16, Policy(**policy)))
        found.append(round(plain_seconds(name, kind, batch) / drafted.seconds, 4))
    return found


def effect(cells: dict[Cell, float], full: dict[Cell, float], costs: str | None = None) -> float:
    """Percent by which the ratios of ``cells`` differ from the full controller's."""
    every = [cells[c] / full[c] for c in cells if costs in (None, c[0])]
    return round(100 * (statistics.geometric_mean(every) - 1), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", default=",".join(TERMS), help="to leave out, one at a time; empty: none")
    parser.add_argument("--costs", default="recorded,weights,rows,ahead,cliff")
    parser.add_argument("--sides", default="ngram+draft", help="proposer sets, comma-separated")
    parser.add_argument("--texts", default="prose,code,tools,edit,mixed,phases")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    cells: list[Cell] = [
        (costs, side, kind, int(batch))
        for costs in options.costs.split(",")
        for side in options.sides.split(",")
        for kind in options.texts.split(",")
        for batch in options.batch.split(",")
    ]
    terms: dict[str, dict[str, Any]] = {ALL: {}} | {name: TERMS[name] for name in options.terms.split(",") if name}
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {name: pool.submit(ratios, policy, cells) for name, policy in terms.items()}
        found = {}
        for name, run in runs.items():
            found[name] = dict(zip(cells, run.result(), strict=True))
            report(name, found[name], found[ALL])
    least = min(ratio for cell, ratio in found[ALL].items() if cell[2] == "prose") if "prose" in options.texts else 1.0
    print(f"prose, all terms: at least {least:.3f}x plain" + ("" if least >= LEAST else f", below {LEAST}"))
    if options.json:
        listed = {name: {"|".join(map(str, c)): r for c, r in of.items()} for name, of in found.items()}
        effects = {name: effect(of, found[ALL]) for name, of in found.items()}
        print(json.dumps({"simulated": True, "policy": asdict(Policy()), "effects": effects, "ratios": listed}))
    return 0 if least >= LEAST else 1


def report(name: str, cells: dict[Cell, float], full: dict[Cell, float]) -> None:
    if name == ALL:
        for costs, side, kind in dict.fromkeys((c[0], c[1], c[2]) for c in cells):
            row = [f"batch {c[3]:>2} {r:6.3f}x" for c, r in cells.items() if c[:3] == (costs, side, kind)]
            print(f"{costs:9} {side:12} {kind:7} {'   '.join(row)}", flush=True)
        return
    by_costs = "  ".join(f"{c} {effect(cells, full, c):+.1f}" for c in dict.fromkeys(c[0] for c in cells))
    print(
        f"without {name:15} {effect(cells, full):+5.1f} %   {by_costs}   least {min(cells.values()):.3f}x", flush=True
    )


if __name__ == "__main__":
    raise SystemExit(main())
