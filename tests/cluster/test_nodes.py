from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serve_app.ray_private import environment as env

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_workers_pools_and_a_node_die_and_every_answer_is_right():
    """Only misses, never an error or a wrong token: see ``nodes.py``."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:
        (Path(scratch) / "ray").mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environ = {
            **clean, **env.client_env(), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": scratch,
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "tests.cluster.nodes"], env=environ, capture_output=True, text=True, timeout=420
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    # 4 + 6 + 4 + 6 + 6 + 6 conversations of two turns, and two hand-overs.
    assert found["right"] == 66
    assert found["remote"] > 0 and found["handed_over"] > 0
