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
def test_k_v_move_between_divisions_on_two_nodes():
    """By the pool of a node, by files, and from another node while a prompt is computed: see ``layouts.py``."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:
        (Path(scratch) / "ray").mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environ = {
            **clean, **env.client_env(), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": scratch,
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "tests.cluster.layouts"], env=environ, capture_output=True, text=True, timeout=580
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    # Each of four divisions takes over from each other while that computes; those of one node fetch, and read files.
    assert found["right"] == 12 + 4 + 4
    here = {"four to stages", "stages to four", "two to one", "one to two"}
    assert found["pools"] == {way: {"node": 299} for way in here}
    assert len(found["handed over"]) == 12
    assert all(path["prefilled"] == 299 for path in found["handed over"].values())
    assert found["files"] == {way: {"disk": 299} for way in here}
