"""What another user of the machine gets: nothing to read, nothing to replace, and no port that runs what it is sent."""

from __future__ import annotations

import os
import pickle
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_app.cluster import read_attachment
from serve_app.run_directory import processes_in
from tests.ray_private.names import called_without_the_token

NOBODY = 65534
# Prints which of the paths it is given may be read or written.
TRIES = 'while read -r path; do if [ -r "$path" ] || [ -w "$path" ]; then echo "$path"; fi; done'


@pytest.fixture
def folder(stack: Any) -> Path:
    """The run folder of the running server."""
    return Path(read_attachment(stack.home).token_path).parent


def test_another_user_reads_and_replaces_nothing(stack: Any, folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    files = [path for place in (stack.home, folder) for path in (place, *place.rglob("*"))]
    processes = processes_in(folder)
    told = [Path(f"/proc/{pid}/{name}") for pid in processes for name in ("environ", "mem", "fd")]
    assert {path.name for path in files} >= {"ray_token", "state.sqlite3"} and len(processes) > 10
    tried = "".join(f"{path}\n" for path in [*files, *told, "/proc/self/environ"])
    done = subprocess.run(
        ["/bin/sh", "-c", TRIES], input=tried, capture_output=True, text=True, cwd="/",
        user=NOBODY, group=NOBODY, extra_groups=[], timeout=60,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["/proc/self/environ", ""], done.stdout + done.stderr


class Runs:
    """Whoever reads this pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_port_runs_what_it_is_sent_without_the_token(folder: Path, tmp_path: Path) -> None:
    ports = {
        connection.laddr.port
        for pid in processes_in(folder)
        for connection in psutil.Process(pid).net_connections("tcp")
        # On loopback are those that speak HTTP, and token inboxes.
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ("::", "0.0.0.0")
    }
    pickled = pickle.dumps(Runs(tmp_path / "run"))
    with ThreadPoolExecutor(8) as threads:
        found = dict(zip(ports, threads.map(lambda port: called_without_the_token(port, pickled), ports), strict=True))
    # Replicas know the call and refuse it; others do not know it, or tell metrics.
    assert list(found.values()).count("UNAUTHENTICATED") >= 4 and "OK" not in found.values(), found
    assert not (tmp_path / "run").exists()
