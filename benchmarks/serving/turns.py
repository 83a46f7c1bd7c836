"""All models of one machine by turns within a memory budget: ``python -m benchmarks from_zero --budget 2GiB``.

Each model sleeps while nobody asks. They are asked one after the other, ``turns`` times, and then all at once. Every
answer must be the known one; what workers hold together is read from the kernel all the while, by this process and not
by the server, and must stay below the budget; and no worker may end but by being put to sleep.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks
from benchmarks.serving.known import Known
from benchmarks.serving.processes import descendants, name_of
from benchmarks.serving.stack import LocalStack, local_stack
from serve_app.ray_private.node_actors import WORKERS

SAMPLE_S = 0.25


def held_bytes(server: int) -> tuple[int, int]:
    """Bytes that the workers below a process hold, shared pages by parts and Ray's object store not, and how many
    workers there are.
    """
    from serve_app.memory import read_held

    total = count = 0
    for pid in descendants(server):
        try:
            worker = name_of(pid).startswith(WORKERS)
        except OSError:
            continue
        if worker:
            total, count = total + read_held(pid).now, count + 1
    return total, count


class Sampler:
    """Reads ``held_bytes`` again and again while it is entered."""

    def __init__(self, server: int, every_s: float = SAMPLE_S) -> None:
        self._server, self._every_s = server, every_s
        self._over = threading.Event()
        self.peak = self.most_workers = self.samples = 0

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._over.wait(self._every_s):
            held, workers = held_bytes(self._server)
            self.peak, self.most_workers = max(self.peak, held), max(self.most_workers, workers)
            self.samples += 1


@dataclass(slots=True)
class Turns:
    """What one run has shown; seconds are those of answers, by model."""

    budget: int = 0
    peak: int = 0
    workers: int = 0
    samples: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    together: dict[str, float] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "budget_bytes": self.budget, "peak_bytes": self.peak, "most_workers": self.workers,
            "samples": self.samples, "moves": self.moves,
            "seconds": {model: statistics.median(each) for model, each in self.seconds.items()},
            "together_s": self.together,
        }  # fmt: skip


def memory_of(stack: LocalStack) -> dict[str, Any]:
    """What the server says of its budget, once a worker has been asked for."""
    request = urllib.request.Request(f"{stack.url}/v1/status", headers={"Authorization": f"Bearer {stack.key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        [node] = json.load(answer)["memory"]
    return dict(node)


def take_turns(
    stack: LocalStack, asked: list[Known], turns: int, checks: Checks, say: Callable[[str], None] = print
) -> Turns:
    """Asks all of them on a server that has a budget."""
    found = Turns()

    def one(known: Known, how: str) -> float:
        began = time.monotonic()
        checks.add(f"{known.model} {how}", known.ask(stack.url, stack.key))
        return time.monotonic() - began

    with Sampler(stack.pid) as sampler:
        for turn in range(turns):
            for known in asked:
                seconds = one(known, f"in turn {turn + 1}")
                found.seconds.setdefault(known.model, []).append(seconds)
                say(f"turn {turn + 1}: {known.model} {seconds:.1f} s")
        with ThreadPoolExecutor(len(asked)) as threads:
            took = threads.map(lambda known: one(known, "with all others"), asked)
            found.together = {known.model: seconds for known, seconds in zip(asked, took, strict=True)}
        time.sleep(2 * SAMPLE_S)
    say("all at once: " + ", ".join(f"{model} {seconds:.1f} s" for model, seconds in found.together.items()))
    told = memory_of(stack)
    found.budget = told["budget_bytes"]
    found.moves = {name: told[name] for name in ("wakes", "sleeps", "closes")}
    found.peak, found.workers, found.samples = sampler.peak, sampler.most_workers, sampler.samples
    checks.that("memory", found.peak <= found.budget, f"{found.peak} bytes of {found.budget}")
    checks.that("turns", found.moves["sleeps"] > 0, "everybody fits: a smaller budget would show something")
    checks.equal("workers that were lost", told["losses"], 0)
    return found


def run(
    make_home: Callable[[Path], None], asked: list[Known], budget: str, turns: int, port: int, also: Iterable[str] = ()
) -> Turns:
    """Starts a server with a budget, and ends it."""
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as folder:
        make_home(Path(folder))
        names = ",".join([*(known.model for known in asked), *also])
        environment = {"SERVE_APP_HOME": folder, "SERVE_APP_MODELS": names, "SERVE_APP_MEMORY_BUDGET": budget}
        with local_stack(port, **environment) as stack:
            found = take_turns(stack, asked, turns, checks)
            checks.require()
    return found
