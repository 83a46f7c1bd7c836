"""What faults do. Each is a context manager: it begins with the block, which is given what was hit, in words, and is
over behind it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.chaos import network
from benchmarks.chaos.asks import TOP, small_tasks
from benchmarks.chaos.network import Mode
from benchmarks.chaos.target import Target, kill

Inject = Callable[[Target, random.Random], AbstractContextManager[str]]
Who = Callable[[Target], list[int]]
MEMORY_BYTES = 2 << 30
FREE_SHARE = 0.25  # of the machine's memory, which is left
INSIST_S = 60.0  # what an operator asks for is done by then


class NotHere(Exception):
    """Nothing can be hit at the moment, such as a worker that has none of its kind."""


# -- who is hit ------------------------------------------------------------------------------------------------------


def named(*prefixes: str) -> Who:
    return lambda target: target.named(*prefixes)


def workers(stage: str) -> Who:
    return lambda target: target.workers(stage)


def owner(target: Target) -> list[int]:
    return target.owner()


def _one(target: Target, dice: random.Random, who: Who) -> int:
    if not (found := sorted(who(target))):
        raise NotHere("there is none at the moment")
    return dice.choice(found)


# -- processes -------------------------------------------------------------------------------------------------------


def killed(who: Who) -> Inject:
    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        pid = _one(target, dice, who)
        kill([pid])
        yield f"process {pid}"

    return inject


def stopped(who: Who) -> Inject:
    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        pid = _one(target, dice, who)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield f"process {pid}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return inject


def all_killed(who: Who) -> Inject:
    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        if not (found := who(target)):
            raise NotHere("there is none at the moment")
        kill(found)
        yield f"processes {found}"

    return inject


def by_hand(model: str) -> Inject:
    """An operator stops a model that nobody else asks anything, and starts it again; that must be so."""

    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        actions, asked = f"{TOP}/ai/models/actions", {"image": small_tasks()[0].body["image"]}
        _insist(lambda: target.ask("POST", actions, {"model": model, "action": "stop"}))
        yield model
        _insist(lambda: _refused(target, model, asked))
        _insist(lambda: target.ask("POST", actions, {"model": model, "action": "start"}))
        _insist(lambda: target.run(model, asked))

    return inject


def _refused(target: Target, model: str, asked: object) -> None:
    """Raises :class:`OSError` unless the model is said not to run."""
    try:
        target.run(model, asked)
    except urllib.error.HTTPError as error:
        if error.code in (400, 404):
            return
        raise
    raise OSError(f"{model} answers though it was stopped")


def _insist(ask: Callable[[], object]) -> None:
    """As who sends it again does, whatever other faults are on."""
    until = time.monotonic() + INSIST_S
    while True:
        try:
            ask()
            return
        except OSError as error:
            if time.monotonic() > until:
                said = ""
                if isinstance(error, urllib.error.HTTPError):
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        said = error.read(300).decode(errors="replace")
                raise RuntimeError(f"by hand: {error} {said}".strip()) from error
            time.sleep(0.3)


LOST = ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "the server")


@contextlib.contextmanager
def server_lost(target: Target, dice: random.Random) -> Iterator[str]:
    """One of what everything hangs on; an operator's systemd then starts the server again."""
    name = dice.choice(LOST)
    target.look()
    kill([target.pid] if name == "the server" else target.named(name))
    yield name
    if wrong := target.start_again():
        raise RuntimeError("; ".join(wrong))


# -- network ---------------------------------------------------------------------------------------------------------


def lossy(ours: Who, theirs: Who) -> Inject:
    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        share = dice.choice([0.2, 0.5, 1.0])
        with network.lossy(ours(target), theirs(target), share) as connections:
            yield f"{share:.0%} of the packets of {connections} connections"

    return inject


def late(ours: Who, theirs: Who) -> Inject:
    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        seconds = dice.choice([0.05, 0.2, 0.8])
        with network.late(ours(target), theirs(target), seconds) as connections:
            yield f"{connections} connections, by up to {seconds} s"

    return inject


def cut(ours: Who, theirs: Who) -> Inject:
    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        yield f"{network.cut(ours(target), theirs(target))} connections"

    return inject


# -- store and disk --------------------------------------------------------------------------------------------------


def store(mode: Mode) -> Inject:
    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        assert target.store is not None
        target.store.set(mode)
        try:
            yield mode
        finally:
            target.store.set("through")

    return inject


@contextlib.contextmanager
def store_killed(target: Target, dice: random.Random) -> Iterator[str]:
    """The server, which is started again at the end, or one session's process, for which it starts anew by itself."""
    assert target.postgresql is not None
    if dice.random() < 0.25:
        try:
            yield f"process {target.postgresql.kill_one(dice)} of a session"
        except ProcessLookupError as none:
            raise NotHere(str(none)) from none
        return
    target.postgresql.kill()
    try:
        yield "all of its processes"
    finally:
        target.postgresql.start()


@contextlib.contextmanager
def store_full(target: Target, dice: random.Random) -> Iterator[str]:
    """PostgreSQL can write no file; an operator who has made room starts it again if it has ended meanwhile."""
    assert target.postgresql is not None
    target.postgresql.limit_files("4096")
    try:
        yield "none of its files can grow beyond 4 KiB"
    finally:
        target.postgresql.limit_files("unlimited")
    if not target.postgresql.runs():
        target.postgresql.start()


@contextlib.contextmanager
def store_locked(target: Target, dice: random.Random) -> Iterator[str]:
    holder = sqlite3.connect(target.home / "state.sqlite3", timeout=10, check_same_thread=False)
    try:
        holder.execute("BEGIN IMMEDIATE")
        yield "nobody else can write"
        holder.rollback()
    finally:
        holder.close()


def disk_full(who: Who) -> Inject:
    """No file can grow beyond 4 KiB, for this process alone (RLIMIT_FSIZE)."""

    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        pids, before = who(target), {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        for pid, (_, most) in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, most))
        try:
            yield f"processes {pids}"
        finally:
            # Those that they have started meanwhile have inherited it.
            limits = next(iter(before.values()), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            for pid in {*before, *who(target)}:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, before.get(pid, limits))

    return inject


@contextlib.contextmanager
def home_read_only(target: Target, dice: random.Random) -> Iterator[str]:
    folders = [path for path in (target.home, *target.home.rglob("*")) if path.is_dir() and not path.is_symlink()]
    before = {path: path.stat().st_mode for path in folders}
    for path in folders:
        path.chmod(0o500)
    try:
        yield f"{len(folders)} folders"
    finally:
        for path, mode in before.items():
            path.chmod(mode)


def damaged(*patterns: str) -> Inject:
    """A byte changed, a file cut short, a file emptied, a file deleted: half of all files of the state directory that
    these patterns find.
    """

    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        hit = 0
        for path in sorted(path for pattern in patterns for path in target.home.glob(pattern)):
            kind = dice.randrange(8)
            with contextlib.suppress(OSError):  # who has written them deletes them, too
                size = path.stat().st_size
                if kind == 0:
                    path.unlink()
                elif kind in (1, 2):
                    os.truncate(path, 0 if kind == 1 else dice.randrange(size + 1))
                elif kind == 3 and size:
                    with path.open("r+b") as file:
                        file.seek(dice.randrange(size))
                        file.write(dice.randbytes(16))
                hit += kind < 4
        if not hit:
            raise NotHere("no such file has been written yet")
        yield f"{hit} files"

    return inject


@contextlib.contextmanager
def token_deleted(target: Target, dice: random.Random) -> Iterator[str]:
    path = target.home / "ray_token"
    kept = path.read_bytes()
    path.unlink()
    try:
        yield str(path.name)
    finally:
        path.write_bytes(kept)
        path.chmod(0o600)


@contextlib.contextmanager
def clock_jumps(target: Target, dice: random.Random) -> Iterator[str]:
    """Forth or back, and then back to where it was, as by a time service that is misled for a while."""
    assert target.clock is not None
    seconds = dice.choice([-1, 1]) * dice.choice([2.0, 60.0, 3600.0])
    target.clock.jump(seconds)
    try:
        yield f"{seconds:+.0f} s"
    finally:
        target.clock.jump(0.0)


# -- the machine -----------------------------------------------------------------------------------------------------


def beside(*sources: str) -> Inject:
    """Programs that run beside the server; each begins when it has said so."""

    @contextlib.contextmanager
    def inject(target: Target, dice: random.Random) -> Iterator[str]:
        started = []
        try:
            for source in sources:
                command = [sys.executable, "-c", source, str(target.home / "beside"), str(_spare_memory())]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            for process in started:
                assert process.stdout is not None
                process.stdout.readline()
            yield f"{len(started)} processes"
        finally:
            for process in started:
                process.kill()
                process.wait()
            (target.home / "beside").unlink(missing_ok=True)

    return inject


def _spare_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return max(1 << 20, min(MEMORY_BYTES, 1024 * (kib["MemAvailable"] - int(FREE_SHARE * kib["MemTotal"]))))


HOLD_MEMORY = "import sys, time; held = b'\\1' * int(sys.argv[2]); print(flush=True); time.sleep(600)"
BURN_CPU = "print(flush=True)\nwhile True: pass"
WRITE_DISK = """
import os, sys
print(flush=True)
while True:
    with open(sys.argv[1], "wb", 0) as file:
        for _ in range(16):
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
"""
