"""Workers as forks: what they inherit, and what happens where there is nobody to fork them."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from serve_app.ray_private.fork_server import SETUP, WITH_TORCH, WORKER, Birth, ForkServer

# A worker that says what it is. "forked": the server's imports are there before it has imported anything.
SCRIPT = """
    import sys
    forked = "ray._private.workers.default_worker" in sys.modules
    threads = len(__import__("os").listdir("/proc/self/task"))
    import json, os, random
    import ray, numpy
    from ray._raylet import UniqueID
    print(json.dumps({
        "forked": forked, "argv": sys.argv, "variable": os.environ.get("MINE"), "cwd": os.getcwd(), "pid": os.getpid(),
        "torch": "torch" in sys.modules, "name": __name__, "parent": os.getppid(),
        "group": os.getpgrp(), "threads": threads,
        "drawn": [UniqueID.from_random().hex(), random.random(), float(numpy.random.rand()), os.urandom(8).hex()],
    }), flush=True)
    print("an error", file=sys.stderr, flush=True)
"""


PATIENCE_S = 240.0


@pytest.fixture
def server(tmp_path):
    # The path of a socket is short.
    running = ForkServer(tmp_path, patience_s=PATIENCE_S)
    yield running
    running.stop()


def launch(server, script, *arguments, job="01000000", **options):
    with server.launching():
        python = sys.executable
    environment = {**os.environ, "MINE": "a value", "RAY_JOB_ID": job, "RAY_RAYLET_PID": str(os.getpid())}
    return subprocess.run(
        [python, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        **options,
    )


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / WORKER
    script.write_text(textwrap.dedent(SCRIPT))
    return script


def test_a_worker_is_forked_with_what_it_would_have_inherited(server, worker, tmp_path):
    # The launcher's standard files go to the worker: reading to their end is waiting for it.
    done = launch(server, worker, "--an", "argument", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["forked"] and told["argv"] == [str(worker), "--an", "argument"] and told["name"] == "__main__"
    assert told["variable"] == "a value" and told["cwd"] == str(tmp_path) and done.stderr == "an error\n"
    assert told["group"] == told["pid"], "raylet kills the process group of a worker that has ended"
    assert not told["torch"], "who forks replicas must not import torch"


def test_forks_draw_different_numbers(server, worker):
    told = [json.loads(launch(server, worker).stdout) for _ in range(3)]
    assert all(t["forked"] for t in told) and len({t["pid"] for t in told}) == 3
    for drawn in zip(*(t["drawn"] for t in told), strict=True):
        assert len(set(drawn)) == 3


def test_what_ray_reads_when_it_is_loaded_makes_another_server(server, worker):
    first, again, other = (json.loads(launch(server, worker, job=job).stdout) for job in ("1", "1", "2"))
    assert first["parent"] == again["parent"] != other["parent"]


@pytest.mark.parametrize(
    ("context", "forked"),
    [
        ({"env_vars": {WITH_TORCH: "1"}, "py_executable": sys.executable}, True),
        ({"env_vars": {WITH_TORCH: "1", "ANOTHER": "x"}, "py_executable": sys.executable}, False),
        ({"env_vars": {WITH_TORCH: "1"}, "py_executable": "/another/python"}, False),
        ({"env_vars": {WITH_TORCH: "1"}, "command_prefix": ["nice"]}, False),
    ],
)
def test_a_worker_that_computes_is_forked_with_torch(tmp_path, worker, context, forked):
    """Nothing but the variable may be asked for: all else is done by the program that Ray has for it."""
    setup = tmp_path / SETUP
    setup.write_text("import sys; print(sys.argv[1:])")
    context = {"command_prefix": [], "java_jars": [], "override_worker_entrypoint": None, **context}
    arguments = [f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON", str(worker), "--an"]
    server = ForkServer(tmp_path, with_torch=forked, patience_s=PATIENCE_S)
    try:
        told = launch(server, setup, *arguments).stdout
    finally:
        server.stop()
    if not forked:
        assert told == f"{arguments}\n"
        return
    told = json.loads(told)
    assert told["argv"] == [str(worker), "--an"] and told["forked"] and told["torch"] and told["threads"] == 1


def test_without_a_server_the_worker_is_executed(server, worker):
    server.stop()
    told = json.loads(launch(server, worker).stdout)
    assert not told["forked"] and told["variable"] == "a value"


def test_another_program_is_executed(server, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text("import sys; print('ray' in sys.modules, sys.argv[1:])")
    assert launch(server, script, "x").stdout == "False ['x']\n"


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    program = (
        "import pathlib, sys\n"
        "from serve_app.ray_private.fork_server import ForkServer\n"
        "print(ForkServer(pathlib.Path(sys.argv[1]))._process.pid, flush=True)\n"
    )
    started = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    pidfd = None
    try:
        pidfd = os.pidfd_open(int(started.stdout))
    except ProcessLookupError:
        return
    import select

    assert select.select([pidfd], [], [], 30)[0], "the server is still there"
    os.close(pidfd)


def test_a_launcher_that_has_given_up_gets_no_fork():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    birth = Birth([WORKER], {}, "/", [theirs.detach()])
    assert not birth.given_up
    ours.close()
    assert birth.given_up
    birth.close()


def test_a_launcher_that_cannot_be_executed_is_known_at_once(tmp_path, monkeypatch):
    """What follows `#!` ends at a blank: Ray's workers would never start."""
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(OSError):
        ForkServer(tmp_path)


def test_servers_without_ray_import_none_of_it():
    """Its library reads what differs between kinds of workers when it is loaded."""
    program = (
        "import sys\n"
        "from serve_app.ray_private.preload import FIRST, TORCH, load\n"
        "load(FIRST + TORCH)\n"
        "print('ray' in sys.modules, *(name in sys.modules for name in TORCH))\n"
    )
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert told[0] == "False" and set(told[1:]) == {"True"}
