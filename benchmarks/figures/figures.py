"""Measures everything that the README's table shows, at one commit, and writes table and conditions into it.

    make figures                                 python -m benchmarks figures [--only NAME,NAME] [--again] [--keep]

Each measurement is a command of its own that ends with a JSON object; one that fails has no figure, and says why. What
has been measured at this commit is kept in ``benchmarks/results/figures.json`` and not measured again (``--again``
does), so a run that was interrupted goes on where it was. The README's table says what is left to measure; with
``--keep`` it shows what earlier commits have measured instead, each figure with its commit and day.

Peers are compared with where they are installed: ``--vllm``, ``--litellm`` and ``--sentence-transformers`` take the
Python of an environment that has them, ``--trace`` a trace in Mooncake's form (``FIGURES_VLLM`` and so on do the same).
``--quick`` runs everything in its smallest form, to try the machinery: its figures mean nothing, and are printed only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.engine.engine import busy_seconds
from benchmarks.figures import report
from benchmarks.figures.places import PEERS, peers, place
from benchmarks.figures.rows import MEASUREMENTS, Measurement

PATIENCE_S = 1500.0
QUIET_CORES = 0.2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [measurement.name for measurement in MEASUREMENTS]
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="the smallest form of everything; writes no file")
    parser.add_argument("--again", action="store_true", help="also what has been measured at this commit")
    parser.add_argument("--keep", action="store_true", help="figures of earlier commits stay, and say so")
    for name, variable in PEERS.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=f"default: {variable}")
    parser.add_argument("--results", type=Path, default=RESULTS / "figures.json")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args(argv)
    chosen = options.only.split(",") if options.only else names
    if unknown := set(chosen) - set(names):
        parser.error(f"no measurement {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    found = peers({name: getattr(options, name.replace("-", "_")) for name in PEERS})
    result = begin(options.results, options.quick, options.keep)
    with tempfile.TemporaryDirectory(prefix="serve-app-figures-") as scratch:
        for measurement in MEASUREMENTS:
            if measurement.name not in chosen:
                continue
            if not options.again and is_measured(result["measured"].get(measurement.name), found):
                print(f"{measurement.name}: measured already", flush=True)
                continue
            result["measured"][measurement.name] = entry = measure(measurement, found, Path(scratch), options.quick)
            print(f"{measurement.name}: {told(measurement, entry)}", flush=True)
            if not options.quick:
                options.results.write_text(json.dumps(result, indent=1) + "\n")
    return end(options, result, names)


def begin(path: Path, quick: bool, keep: bool) -> dict[str, Any]:
    """What has been measured at this commit on this machine, or nothing yet; to ``keep`` is what others have."""
    fresh = {
        "date": str(datetime.date.today()),
        "commit": report.commit(),
        "subject": report.subject(),
        "machine": report.machine(),
        "measured": {},
    }
    if quick or not path.exists():
        return fresh
    before = json.loads(path.read_text())
    # A tree with changes is another one each time.
    same = before["commit"] == fresh["commit"] and before["machine"] == fresh["machine"]
    if same and not fresh["commit"].endswith("+"):
        return before
    if keep and before["machine"] == fresh["machine"]:
        earlier = {"commit": before["commit"], "subject": before.get("subject", ""), "date": before["date"]}
        fresh["measured"] = {name: {"earlier": earlier} | entry for name, entry in before["measured"].items()}
    return fresh


def is_measured(entry: dict[str, Any] | None, found: dict[str, str]) -> bool:
    """Whether there is nothing to gain from another run: no failure, no other commit, no peer that has come since."""
    return entry is not None and not entry.keys() & {"problem", "earlier"} and not set(entry["missing"]) & found.keys()


def measure(measurement: Measurement, found: dict[str, str], scratch: Path, quick: bool) -> dict[str, Any]:
    """``{"missing": peers that are not there, "found": its JSON object | "problem": why there is none, ...}``."""
    missing = [peer for peer, _ in measurement.peers if peer not in found]
    if all(row.peer in missing for row in measurement.rows):
        return {"missing": missing}
    busy = others()
    if busy > QUIET_CORES and not quick:
        print(f"{measurement.name}: other processes use {busy:.1f} cores", file=sys.stderr, flush=True)
    words = (measurement.quick if quick else measurement.command).split()
    words += [word for peer, more in measurement.peers if peer in found for word in more.split()]
    words = [re.sub(r"\{([\w.-]+)\}", lambda match: place(match[1], scratch, found), word) for word in words]
    command = [sys.executable, "-m", *words, "--json"]
    print(f"{measurement.name}: {' '.join(['python', '-m', *words])}", file=sys.stderr, flush=True)
    began = time.monotonic()
    entry: dict[str, Any] = {"missing": missing, "others_cores": round(busy, 2)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
        entry |= outcome(measurement, missing, done.returncode, done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        entry["problem"] = f"it did not end within {PATIENCE_S / 60:.0f} minutes"
    return entry | {"seconds": round(time.monotonic() - began, 1)}


def outcome(measurement: Measurement, missing: list[str], code: int, out: str, err: str) -> dict[str, Any]:
    """The figures of a command that has ended; every row that can be shown must be able to."""
    if code:
        said = [line.strip() for line in err.splitlines() if line.strip()] or ["it said nothing"]
        at = next((n for n, line in enumerate(said) if line.startswith("no figures")), len(said) - 1)
        return {"problem": " ".join(said[at : at + 2])[:300]}
    try:
        found = json.loads(out.strip().splitlines()[-1])
        for row in measurement.rows:
            if row.peer not in missing:
                report.cell(row, found)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        return {"problem": f"its output can't be read ({type(error).__name__}: {error})"[:300]}
    return {"found": found}


def environment() -> dict[str, str]:
    """Ours, with this tree first in line for its modules."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def others(seconds: float = 1.0) -> float:
    """Cores that all processes use while this one does nothing."""
    before = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / seconds


def told(measurement: Measurement, entry: dict[str, Any]) -> str:
    shown = [f"{row.what}: {report.figure(measurement, row, entry)}" for row in measurement.rows]
    return f"{entry.get('seconds', 0):.0f} s\n  " + "\n  ".join(shown)


def end(options: argparse.Namespace, result: dict[str, Any], names: list[str]) -> int:
    """Writes the README where all is there; 1 if a measurement failed."""
    print("\n" + report.section(result))
    left = [name for name in names if "earlier" in result["measured"].get(name, {"earlier": None})]
    failed = [name for name, entry in result["measured"].items() if "problem" in entry]
    if options.quick:
        print("\nquick: these figures mean nothing, and no file was written")
    else:
        report.put(options.readme, report.section(result))
        print(f"\nwritten to {options.readme} and {options.results}")
    if left and not options.quick:
        print(f"left to measure: {', '.join(left)}")
    if failed:
        print(f"failed, and tried again by the next run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
