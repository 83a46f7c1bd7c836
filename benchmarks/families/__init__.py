"""Which model families are served, how, and exactly: every architecture of the installed transformers that reads text.

``python -m benchmarks families [--only WORDS] [--seed N] [--json FILE] [--write]``; ``--speed`` measures instead what
families on transformers' forward give beside ``generate``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "families.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated types, classes or parts of them")
    parser.add_argument("--task", action="append", choices=["text-generation", "text-embeddings", "reranking"])
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, sizes and prompts; 0: sizes that the fast layer takes"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the lines there")
    parser.add_argument("--write", action="store_true", help=f"write {DOCS.name} in docs/ (seed 0, all architectures)")
    parser.add_argument("--speed", action="store_true", help="tokens per second at batch 1 and 8 beside generate")
    options = parser.parse_args()

    import transformers

    from benchmarks.families.architectures import TASKS, architectures
    from benchmarks.families.run import run_all
    from benchmarks.families.table import page, summary
    from benchmarks.families.work import Line

    if options.speed:
        from benchmarks.families.speed import measure

        return measure(options.only, options.json)
    todo = architectures(tuple(options.task or TASKS), options.only)

    so_far: list[Line] = []

    def told(line: Line) -> None:
        name = f"{line.architecture}{f' ({line.variant})' if line.variant else ''}"
        print(f"{line.verdict:8} {name:48} {line.served:22} {line.note[:150]}", flush=True)
        so_far.append(line)
        if options.json:  # what there is, should the run be cut short
            options.json.write_text(json.dumps([found.to_json() for found in so_far], indent=1))

    lines = run_all(todo, options.seed, options.processes, told)
    for task in TASKS:
        if chosen := [line for line in lines if line.task == task]:
            print(f"{task}: {summary(chosen)}")
    if options.json:
        options.json.write_text(json.dumps([line.to_json() for line in lines], indent=1))
    if options.write:
        DOCS.write_text(page(lines, transformers.__version__))
    return 1 if any(line.verdict in ("wrong", "failed") for line in lines) else 0
