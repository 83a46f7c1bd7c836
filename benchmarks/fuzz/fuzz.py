"""Bad input by the thousand: everything that reads what others wrote either takes it or refuses it as documented.

    python -m benchmarks fuzz [--minutes 5] [--only NAME] [--seed 1] [--coverage [--corpus FOLDER]] [--json]

Targets are the dialects' bodies down to prompt and grammar, multipart, grammars, messages and streams of the token
channel, chunk files of the KV cache, journals of the state directory, adapters, pictures, sounds and documents.
``tests/benchmarks/test_fuzz.py`` runs each for a moment. A finding is shrunk by hypothesis and printed with its input;
make a test of it where the cause lies. With ``--coverage`` inputs are led by the code that they reach
(``coverage.py``), and more targets read bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

from benchmarks.fuzz import coverage, targets

BATCH = 200  # examples of one target before the next has its turn


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--only", help="targets whose names contain this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--coverage", action="store_true", help="inputs are led by the code that they reach (atheris)")
    parser.add_argument("--corpus", type=Path, help="with --coverage: a folder for what has reached new code")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    if options.coverage and not coverage.is_there():
        raise SystemExit(coverage.MISSING)
    known = coverage.names(targets.TARGETS) if options.coverage else list(targets.TARGETS)
    left = [name for name in known if options.only is None or options.only in name]
    if not left:
        raise SystemExit(f"no such target; there are {', '.join(known)}")
    tried, findings = _by_coverage(left, options) if options.coverage else _by_chance(left, options)
    print(f"{tried} inputs, {len(findings)} targets with findings: {', '.join(findings) or 'none'}")
    if options.json:
        shown = {name: text.strip().splitlines()[-1] for name, text in findings.items()}
        print(json.dumps({"benchmark": "fuzz", "seed": options.seed, "inputs": tried, "findings": shown}))
    return 1 if findings else 0


def _by_coverage(names: list[str], options: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """How many inputs were tried, and findings by target."""
    tried, findings = 0, {}
    for name in names:
        found = coverage.run(name, options.minutes * 60 / len(names), options.corpus, options.seed)
        tried += found.inputs
        print(f"{name}: {found.inputs} inputs, {found.reached} edges", file=sys.stderr, flush=True)
        if found.finding is not None:
            findings[name] = found.finding
            print(found.finding, file=sys.stderr, flush=True)
    return tried, findings


def _by_chance(left: list[str], options: argparse.Namespace) -> tuple[int, dict[str, str]]:
    until, number, tried, findings = time.monotonic() + options.minutes * 60, options.seed, 0, {}
    while left and time.monotonic() < until:
        for name in list(left):
            try:
                targets.run(name, BATCH, number)
                tried += BATCH
            except Exception as error:
                left.remove(name)  # until it is mended it would find nothing else
                findings[name] = "".join(traceback.format_exception(error))
                print(f"{name}, seed {number}:\n{findings[name]}", file=sys.stderr, flush=True)
            if time.monotonic() > until:
                break
        number += 1
    return tried, findings


if __name__ == "__main__":
    raise SystemExit(main())
