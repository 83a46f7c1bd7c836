"""How a worker's process is set up before anything is loaded."""

from __future__ import annotations

import sys

from serve_app.worker import birth
from serve_app.worker.spec import WorkerSpec


def test_threads_are_bounded_and_share_the_interpreter(monkeypatch, tmp_path):
    monkeypatch.setattr(birth.logs, "set_up", lambda name: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = sys.getswitchinterval()
    try:
        birth.begin(WorkerSpec("tiny", "decode", {}, str(tmp_path), str(tmp_path), cpu_threads=2))
        assert sys.getswitchinterval() == birth.SWITCH_S < before
        assert birth.os.environ["OMP_NUM_THREADS"] == "2"
    finally:
        sys.setswitchinterval(before)
