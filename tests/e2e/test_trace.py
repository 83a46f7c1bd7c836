"""``bench trace --live``: a small trace through the whole stack, cached prefixes and all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.trace.requests import synthetic_rows, write_trace

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_trace_is_replayed_against_the_server(stack, tmp_path) -> None:
    path = tmp_path / "small.jsonl"
    write_trace(path, synthetic_rows(12, seed=4, rate=4.0))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "trace", str(path), "--live", stack.url, "--key", stack.key,
         "--requests", "12", "--duration", "4", "--scale", "0.02", "--ttft-target", "60", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["simulated"] is False and found["requests"] == 12 and found["failed"] == 0, found
    assert found["statuses"] == {"200": 12} and found["ttft_p90_ms"] > 0 and found["hit_ratio"] > 0
