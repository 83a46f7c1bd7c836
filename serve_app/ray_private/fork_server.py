"""Ray's worker processes as forks of processes that have imported what workers need.

A worker of a local stack spends most of its start on imports that every other worker does as well: a second of
processor time and 100 MiB, eight times over. A fork server imports once. Raylet starts workers through a small
launcher, which hands the worker's command line, environment and standard files over. What can't be forked (another
program, no server, a server that does not answer) is executed as if there were no launcher, so a server can end at any
moment.

Ray's library reads some variables of the environment when it is loaded, and the launcher's only are known once raylet
runs. So there is a first server without Ray, and from it one is forked for every set of these variables::

    raylet ──exec──> launcher ──command, environment, files──> server ──same──> server with Ray ──fork──> worker

Workers that compute need torch and transformers as well, which take longer to import than all the rest, and which
replicas must not pay for. A worker says so by :data:`WITH_TORCH` in its environment (:func:`forked`); it is forked from
another line of servers, whose first one imports them while Ray is still starting.

Servers have one thread and no connection to Ray: neither would survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.ray_private.preload import FIRST, THEN, TORCH, TORCH_THEN, load
from serve_app.ray_private.steady import measure_steadily

# The only program that is forked; SETUP runs it in the environment that an actor asks for.
WORKER, SETUP = "default_worker.py", "setup_worker.py"
ROOT = Path(__file__).resolve().parents[2]
# In a worker's environment: it will need torch, unless it is empty. In that of the cluster: there is a server for such
# workers.
WITH_TORCH, TORCH_FORKS = "SERVE_APP_WITH_TORCH", "SERVE_APP_TORCH_FORKS"
# Read when Ray's library is loaded: who differs in them needs a server of its own.
DISTINCT = ("RAY_JOB_ID", "RAY_RAYLET_PID")
MESSAGE_BYTES = 1 << 17
# Runs in a Python without site packages, since it is started for each worker. %(...)r are literals.
_LAUNCHER = """#!%(python)s -IS
import os, sys
command, environment = sys.argv[1:], dict(os.environ)
if command and os.path.basename(command[0]) in (%(worker)r, %(setup)r):
    import json, socket
    if os.path.basename(command[0]) == %(setup)r:
        context = {}
        for word in command[1:]:
            if word.startswith("--serialized-runtime-env-context="):
                context = json.loads(word.partition("=")[2])
        variables = context.pop("env_vars", None) or {}
        asked = {name: value for name, value in context.items() if value}
        if asked in ({}, {"py_executable": %(python)r}) and set(variables) <= {%(variable)r}:
            command = [w for w in command[1:] if not w.startswith(("--serialized-runtime-env", "--language="))]
            environment.update(variables)
    try:
        if os.path.basename(command[0]) != %(worker)r:
            raise OSError
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(%(patience_s)r)
            link.connect(%(address)r)
            told = json.dumps({"argv": command, "env": environment, "cwd": os.getcwd()}).encode()
            socket.send_fds(link, [told], [0, 1, 2])
            if link.recv(1) == b"+":
                os._exit(0)
    except OSError:
        pass
os.execv(%(python)r, [%(python)r, *sys.argv[1:]])
"""


@dataclass(slots=True)
class Birth:
    """What a forked process shall be: ``argv`` without the interpreter, and what it would have inherited. The last of
    ``files`` leads to the launcher, which wants to know that its request has been met.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    files: list[int]

    @property
    def kind(self) -> tuple[str, ...]:
        return tuple(self.env.get(name, "") for name in DISTINCT)

    @property
    def given_up(self) -> bool:
        """Whether the launcher has lost patience: it has become the worker itself."""
        with socket.socket(fileno=os.dup(self.files[-1])) as launcher:
            try:
                return launcher.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

    def send(self, link: socket.socket) -> None:
        told = json.dumps({"argv": self.argv, "env": self.env, "cwd": self.cwd}).encode()
        socket.send_fds(link, [told], self.files)

    @classmethod
    def receive(cls, link: socket.socket) -> Birth | None:
        """None: nobody is there any more."""
        told, files, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 4)
        return cls(**json.loads(told), files=files) if told else None

    def close(self) -> None:
        for file in self.files:
            os.close(file)


class ForkServer:
    """The servers as the process that starts Ray sees them. ``folder`` is this user's alone.

    Raises OSError where the launcher can't be executed (a file system without programs, a Python in a folder with a
    blank in its name) or the socket not be made: Ray's workers would not start then.
    """

    def __init__(self, folder: Path, *, with_torch: bool = False, patience_s: float = 30.0) -> None:
        """``with_torch``: workers that need torch (:func:`forked`) are forked with it. ``patience_s``: how long
        a launcher waits; Ray waits for a worker twice as long.
        """
        address = str(folder / "fork-server")
        self._launcher = folder / "python"
        words = {"python": sys.executable, "worker": WORKER, "setup": SETUP, "address": address}
        self._launcher.write_text(_LAUNCHER % {**words, "variable": WITH_TORCH, "patience_s": patience_s})
        self._launcher.chmod(0o700)
        if subprocess.run([self._launcher, "-V"], capture_output=True, timeout=30).returncode:
            raise OSError(f"{self._launcher} does not start {sys.executable}")
        # numpy's BLAS without threads, which would not survive a fork. The pipe tells the server that this process has
        # ended. A session of its own: Ctrl-C is for this process.
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            # From now on launchers wait for the server rather than do without.
            listener.bind(address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "serve_app.ray_private.fork_server",
                    str(listener.fileno()),
                    *["torch"] * with_torch,
                ],
                # Not the folder that this process was started in: its modules are looked for there first.
                cwd=folder,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Ray started herein starts its Python workers through the launcher: it runs ``sys.executable``."""
        real, sys.executable = sys.executable, str(self._launcher)
        try:
            yield
        finally:
            sys.executable = real

    def stop(self) -> None:
        """Ends the servers; what they have forked goes on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def forked(*, with_torch: bool) -> dict[str, Any]:
    """Options of an actor: whether it is forked with torch, as who computes on a CPU should be. An actor inherits the
    environment of whoever starts it, so one that a worker starts says that it needs none.
    """
    if not os.environ.get(TORCH_FORKS):
        return {}
    return {"runtime_env": {"env_vars": {WITH_TORCH: "1" if with_torch else ""}}}


class Forked(BaseException):
    """Raised in a fork, to leave the server's code behind: what it shall be."""

    def __init__(self, birth: Birth) -> None:
        self.birth = birth


def serve_first(listener: socket.socket, with_torch: bool) -> None:
    """Accepts launchers and passes each on to the server of its kind, until the process that started it has ended."""
    servers: dict[tuple[str, ...], socket.socket] = {}
    with listener, selectors.DefaultSelector() as selector:
        load(FIRST)
        torch = _server(serve_torch, listener) if with_torch else None
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while 0 not in {key.fd for key, _ in selector.select()}:
            link, _ = listener.accept()
            birth = Birth.receive(link)
            if birth is None:
                link.close()
                continue
            birth.files.append(link.detach())
            if torch is not None and birth.env.get(WITH_TORCH):
                with contextlib.suppress(OSError):  # that server has ended: its launchers do without
                    birth.send(torch)
                birth.close()
            else:
                _pass_on(birth, servers, THEN, listener, *([torch] if torch else []))


def serve_torch(link: socket.socket) -> None:
    """Imports torch, and forks a server for each kind of worker that it gets. Ends with the first server."""
    servers: dict[tuple[str, ...], socket.socket] = {}
    load(TORCH)
    while (birth := Birth.receive(link)) is not None:
        _pass_on(birth, servers, TORCH_THEN, link)


def serve(link: socket.socket, distinct: dict[str, str], modules: tuple[str, ...]) -> None:
    """A server with Ray in it. Ends with the server that forked it; raises :class:`Forked` in each of its forks."""
    os.environ.update(distinct)
    with _fixed_class_ids():
        load(modules)
    measure_steadily()
    if not _forks_differ():
        return  # launchers do without
    while (birth := Birth.receive(link)) is not None:
        if birth.given_up:
            birth.close()
            continue
        if os.fork() == 0:
            link.close()
            raise Forked(birth)
        with contextlib.suppress(OSError), socket.socket(fileno=birth.files.pop()) as launcher:
            launcher.send(b"+")
        birth.close()


def _pass_on(
    birth: Birth, servers: dict[tuple[str, ...], socket.socket], modules: tuple[str, ...], *links: socket.socket
) -> None:
    """Gives ``birth`` to the server of its kind, which is forked if there is none. ``links``: what a fork does not
    inherit.
    """
    if birth.kind not in servers:
        distinct = dict(zip(DISTINCT, birth.kind, strict=True))
        servers[birth.kind] = _server(
            lambda link: serve(link, distinct, modules), *links, *servers.values(), files=birth.files
        )
    try:
        birth.send(servers[birth.kind])
    except OSError:  # that server has ended: its launcher does without, the next one gets another
        servers.pop(birth.kind).close()
    birth.close()


def _server(run: Callable[[socket.socket], None], *links: socket.socket, files: Sequence[int] = ()) -> socket.socket:
    """Forks a server that does ``run(its link)`` without ``links`` and ``files``; returns this side of the link."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for link in (ours, *links):
            link.close()
        for file in files:
            os.close(file)
        run(theirs)
        os._exit(0)
    theirs.close()
    return ours


@contextlib.contextmanager
def _fixed_class_ids() -> Iterator[None]:
    """Ray draws a number for each class that is made an actor, mostly when its module is imported. Its generator, once
    used, would give all forks the same numbers, among them the ids of tasks, which must differ.
    """
    import ray.actor

    original: Any = ray.actor.ActorClassID

    class FromSystem:
        @staticmethod
        def from_random() -> Any:
            return original(os.urandom(original.size()))

    ray.actor.ActorClassID = FromSystem
    try:
        yield
    finally:
        ray.actor.ActorClassID = original


def _forks_differ() -> bool:
    """Whether two forks of this process draw different numbers from Ray's generator."""
    from ray._raylet import UniqueID

    drawn = []
    for _ in range(2):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            os.write(theirs, UniqueID.from_random().binary())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as answer:
            drawn.append(answer.read())
    return bool(drawn[0]) and drawn[0] != drawn[1]


def become(birth: Birth) -> None:
    """Runs the program of ``birth`` in this process as if it had been executed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgrp()  # raylet, which starts each worker in a group of its own, kills the groups of those that have ended
    os.close(birth.files.pop())
    for number, file in enumerate(birth.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(birth.env)
    os.chdir(birth.cwd)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # a fork would draw what its siblings draw
    sys.argv = birth.argv
    sys.path[0] = str(Path(birth.argv[0]).parent)
    runpy.run_path(birth.argv[0], run_name="__main__")


def main(listener: int, with_torch: bool) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks: the kernel shall forget them
    try:
        serve_first(socket.socket(fileno=listener), with_torch)
    except Forked as forked:
        birth = forked.birth
    else:
        return
    become(birth)


if __name__ == "__main__":
    main(int(sys.argv[1]), "torch" in sys.argv[2:])
