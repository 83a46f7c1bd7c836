"""Runners that are killed at seeded moments: ``python -m tests.batch.faulty HOME DATABASE SEED FAULTS``.

Two runner processes, forked from this one, work over one store and one folder of files. Each dies by a signal of its
own before, in the middle of, or behind the operation that its dice name: a claim, a write, a finish, a file. Others are
stopped until their claims have lapsed and go on then; disks are full, the store is away, the clock is moved by an hour
for everybody, batches are cancelled. At the end no more happens, and what is unfinished is worked off.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from serve_app.batch import asking
from serve_app.batch import ends as ends_module
from serve_app.batch import runner as runner_module
from serve_app.batch.job import Done, Job
from serve_app.state.blobs.files import open_files
from serve_app.state.deferred.batches import forget
from serve_app.state.errors import Away
from serve_app.state.store.sql import SqlStore
from tests.batch.running import answer, check_complete, make, runner

LEASE_S = 0.4
T = TypeVar("T")
FAULTY = ("claim", "write", "finish", "end", "clear", "planned", "renew", "fill", "claim_input", "claim_end", "done")
# Batches at once, and requests of the largest: of few faults, and of many.
FEW, MANY = (2, 10), (4, 40)
# Requests that fail whoever runs them.
WRONG = 7


class World:
    """What all processes of a run share: folders, a log of faults, a log of what was run, and the clock."""

    def __init__(self, home: Path, database: str) -> None:
        self.home = home
        self.database = database or None
        self.faults = home / "faults"
        self.ran = home / "ran"
        self.offset = home / "offset"
        for path in (self.faults, self.ran):
            path.touch()
        self.offset.write_text("0")

    def now(self) -> float:
        return time.time() + float(self.offset.read_text() or 0)

    def note(self, kind: str) -> None:
        append(self.faults, kind)

    def store(self) -> SqlStore:
        return SqlStore(self.home, self.database)


def append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)


class Fuse:
    """Ends this process at its ``count``-th operation; None: never."""

    def __init__(self, world: World, dice: random.Random, count: int | None) -> None:
        self._world = world
        self._dice = dice
        self._left = count

    def _due(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left == 0

    def die(self, kind: str) -> None:
        self._world.note(f"killed {kind}")
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, name: str, call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._left is not None and self._dice.random() < 0.02:
                self._world.note(f"away {name}")
                raise error
            due = self._due()
            if due and self._dice.random() < 0.5:
                self.die(f"before {name}")
            found = call(*args, **kwargs)
            if due:
                self.die(f"behind {name}")
            return found

        return called

    def torn(self, put: Callable[..., int]) -> Callable[..., int]:
        """The disk is full, or the process ends, in the middle of a file."""

        def called(name: str, data: bytes | Iterable[bytes]) -> int:
            due, full = self._due(), self._left is not None and self._dice.random() < 0.05

            def pieces() -> Iterator[bytes]:
                whole = data if isinstance(data, bytes) else b"".join(data)
                yield whole[: len(whole) // 2]
                if due:
                    self.die("in put")
                if full:
                    self._world.note("full disk")
                    raise OSError(28, "No space left on device")
                yield whole[len(whole) // 2 :]

            return put(name, pieces())

        return called


def work(world: World, seed: int, faults: bool) -> None:
    """A runner, until its fuse is through or nothing is left to do."""
    dice = random.Random(seed)
    fuse = Fuse(world, dice, dice.randint(1, 80) if faults else None)
    store, files = world.store(), open_files(str(world.home / "files"))
    for name in FAULTY:
        setattr(store.batches, name, fuse.around(name, getattr(store.batches, name), Away("the dice say so")))
    files.put = fuse.torn(files.put)  # type: ignore[method-assign]
    failed = OSError(5, "the dice say so")
    files.delete_below = fuse.around("delete", files.delete_below, failed)  # type: ignore[method-assign]

    async def perform(job: Job) -> Done:
        append(world.ran, f"{job.batch} {job.request.number}")
        await asyncio.sleep(dice.uniform(0, 0.004))
        if job.request.number % WRONG == 3:
            return Done(400, b'{"wrong":1}')
        if not job.tries and dice.random() < 0.1:
            return Done(429, b"{}", [], 0.001)
        return await answer(job)

    async def run() -> None:
        working = runner(store.batches, files, perform, clock=world.now, lease_s=LEASE_S)
        task = asyncio.ensure_future(working.run())
        while await asyncio.to_thread(busy, store):
            if task.done():
                task.result()
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def busy(store: SqlStore) -> bool:
    try:
        return store.batches.busy()
    except Away:
        return True


def patiently(call: Callable[[], T]) -> T:
    """What ``call`` gives; asked again while the store is away."""
    while True:
        try:
            return call()
        except Away:
            time.sleep(0.1)


def fork(call: Callable[..., None], *args: Any) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        call(*args)
        code = 0
    finally:
        os._exit(code)


def main(home: str, database: str, seed: int, faults: int) -> None:
    # Nothing waits for as long as it would in a server.
    runner_module.TURN_S = runner_module.GROUP_S = asking.AGAIN_S = 0.01  # type: ignore[misc]
    runner_module.BACKOFF_S = 0.001  # type: ignore[misc]
    ends_module.IDLE_S = ends_module.SWEEP_S = 0.1  # type: ignore[misc]
    world, dice = World(Path(home), database), random.Random(seed)
    files = open_files(str(world.home / "files"))
    began, sizes = time.monotonic(), dict[str, int]()
    with world.store() as store:
        patiently(store.open)
    unfinished, largest = FEW if faults < 50 else MANY
    slots: list[int] = []
    seeds, numbers = iter(range(seed * 1_000_000, sys.maxsize)), count()
    looked = float("-inf")
    while True:
        over = sum(1 for _ in world.faults.open()) >= faults
        if time.monotonic() - looked > 0.1 or over:
            looked = time.monotonic()
            try:
                with world.store() as store:
                    left = [name for name in sizes if store.batches.find("a", name).ended is None]  # type: ignore[union-attr]
                    if not over and dice.random() < 0.1 and left:
                        world.note("cancelled")
                        store.batches.cancel("a", dice.choice(left), world.now())
                    while not over and len(left) < unfinished:
                        name, size = f"b{next(numbers)}", dice.randint(1, largest)
                        # Where the store goes away over it, nobody was told that it is accepted.
                        make(store.batches, files, name, size, deadline=time.time() + 10 * 86_400)
                        sizes[name] = size
                        left.append(name)
                    done = over and not store.batches.busy()
            except Away:
                done = False
            if done:
                break
        while len(slots) < 2:
            slots.append(fork(work, world, next(seeds), not over))
        time.sleep(dice.uniform(0.0, 0.05))
        if not over:
            strike(world, dice, slots)
        slots = [pid for pid in slots if not ended(pid)]
    for pid in slots:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    world.offset.write_text("0")
    with world.store() as store:
        found = [patiently(lambda name=name: store.batches.find("a", name)) for name in sizes]
        for batch in found:
            assert batch is not None and batch.status in ("completed", "cancelled"), batch
            # Who was stopped over an input and killed later may have left shards; they go with the batch.
            patiently(lambda batch=batch: check_complete(store, files, batch, sizes[batch.id], tidy=False))
            # Told twice where the store went away behind it.
            patiently(lambda batch=batch: forget(store.batches, files, batch))
            assert patiently(lambda batch=batch: store.batches.find("a", batch.id)) is None
            assert not files.list(f"batches/{batch.id}/")
    kinds = Counter(" ".join(line.split()[:2]) for line in world.faults.read_text().splitlines())
    runs = Counter(world.ran.read_text().splitlines())
    again = sum(times - 1 for times in runs.values())
    print(f"{kinds.total()} faults: {dict(sorted(kinds.items()))}")
    print(
        f"{len(found)} batches, {sum(sizes.values())} requests, {again} runs more than one each; none lost, none twice"
    )
    print(f"{time.monotonic() - began:.1f} s")


def strike(world: World, dice: random.Random, slots: list[int]) -> None:
    """Now and then something from outside."""
    draw = dice.random()
    if draw < 0.10:
        world.note("killed from outside")
        os.kill(dice.choice(slots), signal.SIGKILL)
    elif draw < 0.13:
        world.note("stopped beyond its claim")
        pid = dice.choice(slots)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(LEASE_S * 1.5)
        os.kill(pid, signal.SIGCONT)
    elif draw < 0.18:
        world.note("clock moved")
        world.offset.write_text(dice.choice(("0", "3600", "-3600")))


def ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
