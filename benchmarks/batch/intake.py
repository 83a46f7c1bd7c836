"""Memory and rate of the intake: a process of its own checks a file line by line, orders it and cuts it into shards."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.batch.files import long_file
from benchmarks.checks import Checks

MODEL = "@cf/pico/pico-instruct"
# Of the process that checks: megabytes more than before, and lines a second.
MOST_MB = 150
LEAST_LINES = 20_000


def intake(lines: int, checks: Checks) -> dict[str, Any]:
    """Figures for a file of so many ``lines``."""
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as scratch:
        source = Path(scratch) / "input.jsonl"
        with source.open("wb") as file:
            for one in long_file(MODEL, lines):
                file.write(one + b"\n")
        size = source.stat().st_size
        asked = [sys.executable, "-m", "benchmarks.batch.intake", str(source), scratch]
        told = subprocess.run(asked, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(told.stdout.splitlines()[-1])
    checks.equal("lines that the intake took", found.pop("requests"), lines)
    checks.equal("lines that it called wrong", found.pop("wrong"), 0)
    checks.equal("lines in shards, each once", found.pop("numbers"), lines * (lines - 1) // 2)
    return {"lines": lines, "megabytes": round(size / 1e6, 1), **found}


def _child(source: Path, scratch: Path) -> dict[str, Any]:
    from serve_app.api.types import ModelLimits
    from serve_app.batch.check import Known
    from serve_app.batch.intake import ShardPlan
    from serve_app.batch.prepare import prepare
    from serve_app.catalog.load import load_catalog
    from serve_app.gateway.models import Models
    from serve_app.gateway.settings import GatewaySettings
    from serve_app.state.blobs.files import DirectoryFiles
    from serve_app.state.callers.accounts import Caller
    from serve_app.state.deferred.batches import Batch, unpack

    home = scratch / "home"
    home.mkdir()
    models = Models(load_catalog(home), "local", (), home)
    settings = GatewaySettings("local", (), "s", str(home), "local")
    known = Known(models.named, lambda model: ModelLimits(), lambda caller, model: None, settings, 10_000_000)
    files = DirectoryFiles(scratch / "files")
    with source.open("rb") as file:
        files.put("files/in", iter(lambda: file.read(1 << 20), b""))
    about = json.dumps({"endpoint": "/v1/chat/completions"}).encode()
    batch = Batch("ab" * 16, "openai", Caller("local"), 0.0, 9.0, 9.0, about=about, input="files/in")
    before = _peak_mb()
    began, cpu = time.perf_counter(), time.process_time()
    plan = prepare(files, batch, known)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    more = _peak_mb() - before
    if not isinstance(plan, ShardPlan):
        raise SystemExit(f"no figures: the file was refused: {plan.problems[:500]!r}")
    numbers = sum(request.number for shard in plan.shards for request in unpack(files.get(shard.blob)))
    return {
        "requests": sum(shard.requests for shard in plan.shards),
        "wrong": sum(1 for _ in plan.wrong),
        "numbers": numbers,
        "more_mb": round(more, 1),
        "lines_per_s": round(plan.total / wall),
        "lines_per_cpu_s": round(plan.total / cpu),
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), Path(sys.argv[2]))))
