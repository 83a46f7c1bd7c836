"""Workers as forks: what they inherit, and what happens where there is nobody to fork them."""

import gc
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.serving.processes import descendants
from serve_app.ray_private.fork_server import SETUP, WITH_TORCH, WORKER, Birth, ForkServer
from serve_app.ray_private.preload import TORCH, load

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
        "modules": list(sys.modules), "name": __name__, "parent": os.getppid(),
        "group": os.getpgrp(), "threads": threads,
        "drawn": [UniqueID.from_random().hex(), random.random(), float(numpy.random.rand()), os.urandom(8).hex()],
    }), flush=True)
    print("an error", file=sys.stderr, flush=True)
"""


PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # The path of a socket is short.
    running = ForkServer(tmp_path_factory.mktemp("s"), patience_s=PATIENCE_S)
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
    assert "torch" not in told["modules"], "who forks replicas must not import torch"


def test_forks_draw_different_numbers(server, worker):
    told = [json.loads(launch(server, worker).stdout) for _ in range(3)]
    assert all(t["forked"] for t in told) and len({t["pid"] for t in told}) == 3
    for drawn in zip(*(t["drawn"] for t in told), strict=True):
        assert len(set(drawn)) == 3


def test_what_ray_reads_when_it_is_loaded_makes_another_server(server, worker):
    first, again, other = (json.loads(launch(server, worker, job=job).stdout) for job in ("1", "1", "2"))
    assert first["parent"] == again["parent"] != other["parent"]


@pytest.fixture
def set_up(worker, tmp_path):
    """``set_up(server, context)``: what is printed where Ray sets an actor's environment up before the worker runs."""
    setup = tmp_path / SETUP
    setup.write_text("import sys; print(sys.argv[1:])")

    def launched(server, context):
        context = {"command_prefix": [], "java_jars": [], "override_worker_entrypoint": None, **context}
        told = f"--serialized-runtime-env-context={json.dumps(context)}"
        return launch(server, setup, told, "--language=PYTHON", str(worker), "--an").stdout, told

    return launched


@pytest.mark.parametrize(
    "context",
    [
        {"env_vars": {WITH_TORCH: "1", "ANOTHER": "x"}, "py_executable": sys.executable},
        {"env_vars": {WITH_TORCH: "1"}, "py_executable": "/another/python"},
        {"env_vars": {WITH_TORCH: "1"}, "command_prefix": ["nice"]},
    ],
)
def test_whoever_asks_for_more_than_the_variable_is_set_up_by_ray(server, set_up, worker, context):
    printed, told = set_up(server, context)
    assert printed == f"{[told, '--language=PYTHON', str(worker), '--an']}\n"


def loaded(pids, library):
    """Those of the processes that have a library loaded."""
    return {pid for pid in pids if library in Path(f"/proc/{pid}/maps").read_text()}


@pytest.mark.slow
def test_a_worker_that_computes_is_forked_with_torch_and_others_are_not(tmp_path, worker, set_up):
    server = ForkServer(tmp_path, with_torch=True, patience_s=PATIENCE_S)
    try:
        with_torch, without = (
            json.loads(set_up(server, {"env_vars": {WITH_TORCH: value}, "py_executable": sys.executable})[0])
            for value in ("1", "")
        )
        servers = set(descendants(server._process.pid)) - {with_torch["pid"], without["pid"]}
        torch, ray = loaded(servers, "libtorch_cpu"), loaded(servers, "_raylet")
    finally:
        server.stop()
    for told in (with_torch, without):
        assert told["argv"] == [str(worker), "--an"] and told["forked"] and told["threads"] == 1
    assert set(TORCH) <= set(with_torch["modules"]) and "torch" not in without["modules"]
    # Ray's library reads what differs between kinds of workers when it is loaded: the first of either line has none.
    assert server._process.pid not in torch | ray
    assert len(torch - ray) == len(torch & ray) == len(ray - torch) == 1


def test_imports_are_collected_once_at_their_end(tmp_path, monkeypatch):
    (tmp_path / "many_objects.py").write_text("made = [[] for _ in range(50_000)]")
    monkeypatch.syspath_prepend(tmp_path)
    happened = []
    tell = lambda phase, about: happened.append((phase, about["generation"]))  # noqa: E731
    gc.callbacks.append(tell)
    try:
        load(("many_objects", "not_there"))
    finally:
        gc.callbacks.remove(tell)
    assert happened == [("start", 2), ("stop", 2)]
    assert gc.isenabled() and gc.get_freeze_count() > 50_000


def test_without_a_server_the_worker_is_executed(worker, tmp_path):
    server = ForkServer(tmp_path)
    server._process.kill()
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
