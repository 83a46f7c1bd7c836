"""Inner ports: free, and no two servers get the same one."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys

import pytest

from serve_app.inner_ports import InnerPorts

linux = pytest.mark.skipif(sys.platform != "linux", reason="ports are held in Linux' abstract namespace")


def unused() -> int:
    """A port below those that the system gives to connections."""
    while True:
        port = random.randrange(20_000, 29_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def test_a_port_that_listens_is_left_out() -> None:
    with socket.socket() as taken:
        taken.bind(("", unused()))
        taken.listen()
        port = taken.getsockname()[1]
        (chosen,) = InnerPorts().choose([port])
    assert chosen > port


@linux
def test_a_port_that_another_server_has_chosen_but_not_opened_is_left_out() -> None:
    port = unused()
    program = (
        "import sys; from serve_app.inner_ports import InnerPorts; held = InnerPorts();"
        "print(*held.choose([int(sys.argv[1])]), flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(port)], stdin=-1, stdout=-1, text=True)
    assert other.stdin is not None and other.stdout is not None
    theirs = int(other.stdout.readline())
    ours = InnerPorts()
    assert ours.choose([theirs])[0] > theirs
    other.kill()  # however it ends, its ports are free again
    other.wait()
    assert InnerPorts().choose([theirs]) == [theirs]


@linux
def test_a_server_gives_its_ports_back() -> None:
    port, first = unused(), InnerPorts()
    (chosen,) = first.choose([port])
    assert InnerPorts().choose([chosen]) != [chosen]
    first.close()
    assert InnerPorts().choose([chosen]) == [chosen]
