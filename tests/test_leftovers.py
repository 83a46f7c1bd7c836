"""What a test session leaves behind in the temporary directory: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serve_app.config import load_settings

ROOT = Path(__file__).resolve().parents[1]
INNER = """
import pathlib, tempfile
import tests.conftest as conftest

def test_it(tmp_path):
    made = pathlib.Path(tempfile.mkdtemp(prefix="made-"))
    assert conftest.SCRATCH in made.parents and conftest.SCRATCH in tmp_path.parents
    assert conftest._CLUSTER_SETTINGS.home.parent == conftest.SCRATCH
"""


@pytest.mark.slow
def test_a_session_leaves_nothing(tmp_path):
    inner, scratch = ROOT / "tests" / f"test_inner_{os.getpid()}.py", tmp_path / "tmp"
    scratch.mkdir()
    try:
        inner.write_text(INNER)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(inner)]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True
        )
    finally:
        inner.unlink()
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert list(scratch.iterdir()) == []


def test_a_cluster_that_was_never_started_leaves_nothing(tmp_path, monkeypatch):
    from serve_app.cluster import LocalCluster

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    cluster = LocalCluster(load_settings({"SERVE_APP_HOME": str(tmp_path / "home")}))
    folder = Path(cluster.environment["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"]).parent
    assert folder.is_dir()
    # Workers of torch make theirs in it as well.
    assert Path(cluster.environment["TORCHINDUCTOR_CACHE_DIR"]).parent == folder
    cluster.stop()
    assert list((tmp_path / "tmp").iterdir()) == [] and not folder.exists()
