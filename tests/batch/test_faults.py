"""Runners that die at any moment lose no request, and charge none twice; see `tests/batch/faulty.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest


def run(home, database: str, seed: int, faults: int) -> str:
    command = [sys.executable, "-m", "tests.batch.faulty", str(home), database, str(seed), str(faults)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_nothing_is_lost_and_nothing_counts_twice(database, tmp_path):
    told = run(tmp_path, database, 3, 6)
    assert "none lost, none twice" in told and "killed" in told


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
def test_a_thousand_faults(database, tmp_path, seed, request):
    """500 each; PostgreSQL itself goes away and comes back meanwhile."""
    ends = threading.Event()

    def restart() -> None:
        server = request.getfixturevalue("postgres_server")
        while not ends.wait(10.0):
            server.stop()
            server.start()

    thread = threading.Thread(target=restart)
    if not database.startswith("sqlite"):
        thread.start()
    try:
        print(run(tmp_path, database, seed, 500))
    finally:
        ends.set()
        if thread.is_alive():
            thread.join()
