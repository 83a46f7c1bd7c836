"""Programs with a Ray of their own beside that of the test session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def told_by(module: str, environment: Mapping[str, str], timeout: float) -> Any:
    """What a program prints last, as JSON; its other environment has nothing of Ray's or of ours."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:
        (Path(scratch) / "ray").mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
        environ = {
            **clean, **environment, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": scratch, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", module]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
