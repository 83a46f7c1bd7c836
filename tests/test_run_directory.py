"""The folder of a running server goes with it, however it ends; so does what runs in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve_app import run_directory
from serve_app.run_directory import RunDirectory, processes_in, remove_leftovers

# Makes a folder and a daemon whose command line names it, says where, and waits to be ended.
OWNER = """
import subprocess, sys, time
from serve_app.run_directory import RunDirectory
made = RunDirectory()
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"{made.path}/daemon"],
                          start_new_session=True)
print(made.path, daemon.pid, made._keeper.pid, flush=True)
time.sleep(600)
"""


# One that has given itself a title, as Ray's agents do: only its environment tells whose it is.
TITLED = """
import os, subprocess, sys, time
from serve_app.run_directory import RunDirectory
made = RunDirectory()
daemon = subprocess.Popen(["ray::Agent", "600"], executable="/bin/sleep", start_new_session=True,
                          env={**os.environ, "RAY_AUTH_TOKEN_PATH": f"{made.path}/ray_token"})
print(made.path, daemon.pid, made._keeper.pid, flush=True)
time.sleep(600)
"""

# One whose title is written by Ray, in the environment that Ray is started with.
RAY_TITLED = """
import os, subprocess, sys, time
from serve_app.ray_private.environment import ONE_MACHINE
from serve_app.run_directory import RunDirectory
made = RunDirectory()
source = "from tests.ray_private.names import take_title; take_title('ray::Agent'); import time; time.sleep(600)"
daemon = subprocess.Popen([sys.executable, "-c", source], start_new_session=True,
                          env={**os.environ, **ONE_MACHINE, "RAY_AUTH_TOKEN_PATH": f"{made.path}/ray_token"})
print(made.path, daemon.pid, made._keeper.pid, flush=True)
time.sleep(600)
"""

# One that becomes something else when it is asked to end, and stays.
BECOMES_ANOTHER = """
import subprocess, sys, time
from serve_app.run_directory import RunDirectory
made = RunDirectory()
source = '''
import os, signal, time
other = ["sh", "-c", "trap : TERM; while :; do sleep 1; done"]
signal.signal(signal.SIGTERM, lambda *_: os.execve("/bin/sh", other, {}))
print(flush=True)
time.sleep(600)
'''
daemon = subprocess.Popen([sys.executable, "-c", source, f"{made.path}/daemon"], start_new_session=True,
                          stdout=subprocess.PIPE)
daemon.stdout.readline()
print(made.path, daemon.pid, made._keeper.pid, flush=True)
time.sleep(600)
"""


def owner(source: str = OWNER) -> tuple[subprocess.Popen[str], Path, int, int]:
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path, daemon, keeper = process.stdout.readline().split()
    return process, Path(path), int(daemon), int(keeper)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def until(condition, seconds: float = 60) -> bool:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return condition()


def test_it_is_private_and_short_enough_for_sockets() -> None:
    made = RunDirectory()
    try:
        assert made.path.stat().st_mode & 0o777 == 0o700 and made.haproxy.is_dir()
        assert len(os.fsencode(made.path)) <= run_directory.MAX_PATH
    finally:
        made.close()
    assert not made.path.exists()


@pytest.mark.parametrize("source", [OWNER, TITLED, RAY_TITLED, BECOMES_ANOTHER])
def test_a_killed_owner_leaves_nothing_behind(source: str) -> None:
    process, path, daemon, _ = owner(source)
    assert until(lambda: processes_in(path) == [daemon])  # once it is executed
    end(process)
    assert until(lambda: gone(daemon) and not path.exists())


# One that does not end when it is asked to.
STAYS = """
import subprocess, sys, time
from serve_app.run_directory import RunDirectory
made = RunDirectory()
source = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
daemon = subprocess.Popen([sys.executable, "-c", source, f"{made.path}/daemon"], start_new_session=True,
                          stdout=subprocess.PIPE)
daemon.stdout.readline()
print(made.path, daemon.pid, made._keeper.pid, flush=True)
time.sleep(600)
"""


def test_who_stays_is_ended_in_time_however_long_a_look_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, where each program takes a second to start."""
    real = shutil.which("grep")
    slow = tmp_path / "grep"
    slow.write_text(f'#!/bin/sh\necho >>"{tmp_path}/looks"\nsleep 0.7\nexec {real} "$@"\n')
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    process, path, daemon, _ = owner(STAYS)
    end(process)
    assert until(lambda: gone(daemon) and not path.exists())
    assert len((tmp_path / "looks").read_text()) <= 8


def test_without_its_keeper_the_next_start_removes_it() -> None:
    process, path, daemon, keeper = owner()
    assert path not in remove_leftovers() and path.exists()  # it runs
    os.kill(keeper, signal.SIGKILL)
    end(process)
    assert path in remove_leftovers()
    assert gone(daemon) and not path.exists()


def test_who_no_longer_names_the_folder_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "ASKED_S", 0.5)
    process, path, daemon, keeper = owner(BECOMES_ANOTHER)
    os.kill(keeper, signal.SIGKILL)
    end(process)
    run_directory.end_processes(path)
    assert until(lambda: gone(daemon))
    assert path in remove_leftovers()
