"""A replica's side of the memory budget: its worker comes up when the node's broker has room for it, and makes room.

Calls wait while the worker sleeps. A replica stays, for it holds next to nothing; Serve takes it away as it always
does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import serve

from deployments.memory_broker import get_or_create_broker
from serve_app.catalog.need import OPTIONAL, Need, estimate
from serve_app.catalog.records import Weights
from serve_app.routing import memory as policy
from serve_app.wire.memory import ASLEEP, CLOSE, GOING, LEAVE, NEVER, UP, Resident, TurnTold, read_turn_told
from serve_app.worker.spec import WorkerSpec

log = logging.getLogger("ray.serve")

# A call waits so long for room, and is refused then.
WAIT_S = 300.0
# After a call that found no worker and went on without, that long one is wanted.
WISH_S = 10.0
# Before a broker is asked again that did not answer.
AGAIN_S = 0.2


class NoRoom(RuntimeError):
    """There is no room for the worker in the memory budget; the text says who has it, or what to do."""


class Sleeper(Protocol):
    """What a tenancy wakes and puts to sleep: :class:`deployments.supervisor.Supervisor`."""

    @property
    def ready(self) -> bool: ...

    @property
    def pid(self) -> int: ...

    async def wake(self) -> None: ...

    async def sleep(self) -> None: ...


class Tenancy:
    """``sleeps``: the worker may be put to sleep, and comes up with the first call."""

    def __init__(self, spec: WorkerSpec, need: Need, replica: str) -> None:
        self._spec, self._need, self._replica = spec, need, replica
        self.sleeps = spec.may_sleep
        self._optional = spec.stage in OPTIONAL
        self._sleeper: Sleeper | None = None
        self._told = TurnTold(ASLEEP)
        self._state = ASLEEP
        self._number = 0
        self._inside = self._waiting = 0
        self._idle_since = time.monotonic()
        self._waits_since = 0.0
        self._wished_until = 0.0
        self._changed, self._news = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._acting: asyncio.Task[None] | None = None
        self._broker: Any = None

    def begin(self, sleeper: Sleeper) -> None:
        """Tells the broker of the worker from now on."""
        self._sleeper = sleeper
        if self._task is None:
            self._task = asyncio.ensure_future(self._live())

    async def let_in(self) -> None:
        """Waits until the worker may come up; for one that never sleeps. Raises :class:`NoRoom`."""
        self._waiting += 1
        self._waits_since = time.monotonic()
        self._changed.set()
        try:
            while self._told.state != UP:
                if self._told.state == NEVER:
                    raise NoRoom(self._told.why)
                await self._news.wait()
            self._state = UP
        finally:
            self._waiting -= 1

    @contextlib.asynccontextmanager
    async def using(self) -> AsyncIterator[None]:
        """Work is under way within: the worker does not go meanwhile. Waits for room first, and raises
        :class:`NoRoom`, or ``LookupError`` if its caller does without.
        """
        if not self._open:
            await self._opened()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle_since = time.monotonic()
                if self._told.state == CLOSE:
                    self._act()

    @property
    def _open(self) -> bool:
        return self._told.state in (UP, LEAVE) and self._state == UP

    async def _opened(self) -> None:
        if self._optional:
            if time.monotonic() > self._wished_until:
                self._waits_since = time.monotonic()
            self._wished_until = time.monotonic() + WISH_S
            self._changed.set()
            raise LookupError(f"the {self._spec.stage} worker sleeps")
        if not self._waiting:
            self._waits_since = time.monotonic()
        self._waiting += 1
        self._changed.set()
        try:
            async with asyncio.timeout(WAIT_S):
                while not self._open:
                    if self._told.state == NEVER:
                        raise NoRoom(self._told.why)
                    await self._news.wait()
        except TimeoutError:
            raise NoRoom(self._told.why or f"{self._spec.model} waits for room") from None
        finally:
            self._waiting -= 1

    # -- inside ------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        asked: set[asyncio.Task[None]] = set()
        while True:
            self._changed.clear()
            asked.add(asyncio.ensure_future(self._ask()))
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({changed, *asked}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            asked = {task for task in asked if not task.done()}

    async def _ask(self) -> None:
        self._number += 1
        try:
            if self._broker is None:
                self._broker = await asyncio.to_thread(get_or_create_broker, node_id(), self._spec.home)
            told = read_turn_told(await self._broker.turn.remote(self._resident().encode()))
        except Exception as error:  # it is being started again
            log.info("the memory broker does not answer (%s)", type(error).__name__)
            self._broker = None
            await asyncio.sleep(AGAIN_S)
            return
        self._told = told
        self._act()
        self._news.set()
        self._news = asyncio.Event()

    def _act(self) -> None:
        """Does what the broker says, as far as work that is under way lets it."""
        sleeper = self._sleeper
        assert sleeper is not None
        if self._acting is not None and not self._acting.done():
            return
        said = self._told.state
        if said == UP and self._state == ASLEEP and self.sleeps:
            self._state, self._wished_until = UP, 0.0
            self._acting = asyncio.ensure_future(self._quietly(sleeper.wake()))
        elif self._state == UP and not self._inside and sleeper.ready and self._may_go(said):
            self._state = GOING
            self._acting = asyncio.ensure_future(self._quietly(sleeper.sleep()))

    def _may_go(self, said: str) -> bool:
        """What the broker knows of the worker may be a second old: one that has just been used is not idle."""
        idle = not self._waiting and time.monotonic() - self._idle_since >= policy.IDLE_S
        return said == CLOSE or (said == LEAVE and idle)

    async def _quietly(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # it is told by whoever calls the worker
            log.error("a worker could not be woken or put to sleep", exc_info=error)
        if self._state == GOING:
            self._state = ASLEEP
        self._changed.set()

    def _resident(self) -> Resident:
        spec, need, now = self._spec, self._need, time.monotonic()
        assert self._sleeper is not None
        waits = self._waiting > 0 or now < self._wished_until
        return Resident(
            self._replica, spec.model, spec.stage, self._number, spec.memory_budget, key_of(spec),
            need.least, need.likely or 0, need.grows, spec.gpu_turn, not self.sleeps, self._optional, spec.ranks,
            os.getpid(), self._state, self._told.state, self._sleeper.ready, self._sleeper.pid, self._inside > 0,
            0.0 if self._inside else now - self._idle_since, waits, now - self._waits_since if waits else 0.0,
        )  # fmt: skip


def node_id() -> str:
    """Of this process."""
    return str(ray.get_runtime_context().get_node_id())


def key_of(spec: WorkerSpec) -> str:
    """What a worker takes depends on this, as far as an operator can change it."""
    weights = [spec.weights, spec.draft_weights]
    sizes = (spec.dtype, spec.quantization, spec.kv_cache_bytes, spec.max_batch_tokens, spec.max_num_seqs, spec.ranks)
    return f"{spec.model} {spec.stage} {weights} {sizes} {spec.cpu_threads}"


def need_of(spec: WorkerSpec) -> Need:
    """Before anything is known of it."""
    if spec.device != "cpu":
        return Need(0, 0)
    weights = [Weights.model_validate(each) for each in (spec.weights, spec.draft_weights) if each]
    return estimate(
        weights, Path(spec.home), Path(spec.source), cache=spec.kv_cache_bytes, publishes=spec.publish,
        quantization=spec.quantization, ranks=spec.ranks,
    )  # fmt: skip


def tenancy(spec: WorkerSpec) -> Tenancy | None:
    """For a worker of a server with a budget; None without one."""
    if not spec.memory_budget:
        return None
    return Tenancy(spec, need_of(spec), serve.get_replica_context().replica_id.unique_id)
