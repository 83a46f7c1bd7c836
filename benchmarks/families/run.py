"""Runs architectures in processes of their own, so that one that ends its process is a line and not the end."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.families.architectures import Architecture
from benchmarks.families.work import Line, serve

LIMIT_S = 300.0


def run_all(
    todo: list[Architecture], seed: int, processes: int, told: Callable[[Line], None] = lambda line: None,
    *, start: str = "forkserver",
) -> list[Line]:  # fmt: skip
    """Lines in the order of ``todo``; each is ``told`` as it comes. ``start`` is how processes come to be, in the
    words of :mod:`multiprocessing`."""
    context: Any = mp.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["benchmarks.families.preload"])
    lines: dict[int, Line] = {}
    running: dict[Connection, tuple[int, Any, float]] = {}
    waiting = list(enumerate(todo))[::-1]
    while waiting or running:
        while waiting and len(running) < processes:
            index, architecture = waiting.pop()
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(theirs, architecture, seed), daemon=True)
            process.start()
            theirs.close()
            running[mine] = (index, process, time.monotonic())
        for connection in wait(list(running), timeout=1.0):
            index, process, _ = running.pop(connection)  # type: ignore[call-overload]
            lines[index] = _received(connection, process, todo[index])  # type: ignore[arg-type]
            told(lines[index])
        for connection, (index, process, started) in list(running.items()):
            if time.monotonic() - started > LIMIT_S:
                del running[connection]
                process.kill()
                lines[index] = _ended(todo[index], f"took more than {LIMIT_S:.0f} s")
                told(lines[index])
    return [lines[i] for i in range(len(todo))]


def _received(connection: Connection, process: Any, architecture: Architecture) -> Line:
    try:
        line = connection.recv()
    except EOFError:
        process.join(10)
        code = process.exitcode
        return _ended(architecture, f"the process ended with {f'signal {-code}' if code and code < 0 else code}")
    process.join(10)
    return line


def _ended(architecture: Architecture, note: str) -> Line:
    a = architecture
    return Line(a.task, a.model_type, a.name, a.variant, "-", "failed", note)
