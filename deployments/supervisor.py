"""Keeps one worker actor alive for a replica: starts it, starts another when it is lost, and lets calls wait
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from msgspec.structs import replace
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments import pulse
from deployments.bundles import beside_replica
from deployments.tenancy import Tenancy
from serve_app.activity import read_activity
from serve_app.ray_private.fork_server import forked
from serve_app.wire.replicas import Counters, Pulse, read_counters, read_pulse

log = logging.getLogger("ray.serve")

T = TypeVar("T")

# A worker that is put to sleep has so long to end.
END_S = 10.0
# Who looks at counters does not wait for a worker that loads, or that is held up.
GLANCE_S = 1.0


def beside(num_gpus: float) -> dict[str, Any]:
    """Actor options of a worker: on its replica's node, whose pool it publishes to.

    With a GPU the first bundle of the replica's placement group sees to that.
    """
    if num_gpus:
        return {"num_gpus": num_gpus, **beside_replica()}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_gpus": 0, "scheduling_strategy": here, **forked(with_torch=True)}


class WorkerLost(RuntimeError):
    """The worker died while it had this request; the request may be tried elsewhere."""


class Supervisor:
    """``start`` creates the actor, ``greet`` awaits that it is usable and tells it what else it needs to know.

    The actor belongs to this process and ends with it. When the actor ends first, a call in flight fails with
    :class:`WorkerLost`, and the next ones wait for its successor: while they wait they count as ongoing requests, so
    that Serve's router prefers other replicas. Serve itself replaces the replica only if workers keep dying.

    An actor that hangs (:mod:`deployments.pulse`) is killed, and no call waits for it to be dead: what it might still
    answer reaches nobody. ``device``: its steps wait for a GPU. With a ``tenancy`` the actor comes up and goes as the
    node's memory budget has it.
    """

    MAX_RESTARTS = 3
    WINDOW_S = 300.0

    def __init__(
        self,
        start: Callable[[], Any],
        greet: Callable[[Any], Awaitable[Any]],
        *,
        device: bool = False,
        tenancy: Tenancy | None = None,
    ) -> None:
        self._tenancy = tenancy
        self.pid = 0
        self._device_step_s = pulse.DEVICE_STEP_S if device else None
        self._start = start
        self._greet = greet
        self._worker: Any = None
        self._ready = asyncio.Event()
        self._restarts: deque[float] = deque(maxlen=self.MAX_RESTARTS + 1)
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        # Of each call in flight: ends its wait.
        self._flying: set[asyncio.Timeout] = set()
        self._given_up: BaseException | None = None

    @property
    def ready(self) -> bool:
        """Whether a call would reach a worker without waiting for it to load."""
        return self._ready.is_set()

    async def begin(self, worker: Any = None) -> None:
        """Starts the first worker, unless one is given; its failure is the caller's (who can't start says why).
        One that may sleep comes up with the first call.
        """
        if self._tenancy is not None:
            self._tenancy.begin(self)
            if self._tenancy.sleeps:
                return
            await self._tenancy.let_in()
        await self._bring_up(worker)

    async def wake(self) -> None:
        """Has the worker come up again. For the tenancy."""
        try:
            await self._bring_up()
        except Exception as error:
            log.error("a worker could not be started", exc_info=error)
            await self._restart()

    async def sleep(self) -> None:
        """Ends the worker, which has nothing to do, and returns when it has gone. For the tenancy."""
        worker, self._worker = self._worker, None
        self._ready.clear()
        pid, self.pid = self.pid, 0
        ray.kill(worker)
        if not await asyncio.to_thread(pulse.gone, pid, END_S):
            pulse.end(pid)
            await asyncio.to_thread(pulse.gone, pid, END_S)

    async def _bring_up(self, worker: Any = None) -> None:
        self._worker = worker if worker is not None else self._start()
        await self._greet(self._worker)
        self._ready.set()
        self._watching = asyncio.ensure_future(self._watch(self._worker))

    async def call(self, function: Callable[[Any], Awaitable[T]]) -> T:
        """``await function(worker)`` on the living worker, which comes up for it. Raises :class:`WorkerLost`, and
        :class:`~deployments.tenancy.NoRoom`.
        """
        if self._tenancy is None:
            return await self.reach(function)
        try:
            async with self._tenancy.using():
                return await self.reach(function)
        except LookupError as asleep:
            raise WorkerLost("the worker sleeps") from asleep

    async def reach(self, function: Callable[[Any], Awaitable[T]]) -> T:
        """:meth:`call` for what is no use of the worker: it is asked while it is up, and may sleep all the same."""
        await self._ready.wait()
        if self._given_up is not None:
            raise WorkerLost("workers of this replica keep dying") from self._given_up
        worker = self._worker
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._flying.add(scope)
                return await function(worker)
        except ray.exceptions.RayActorError as lost:
            self._lost(worker)
            raise WorkerLost("the worker was lost") from lost
        except TimeoutError:
            if scope.expired():
                raise WorkerLost("the worker was given up") from None
            raise
        finally:
            self._flying.discard(scope)

    async def counters(self, stage: str) -> Counters:
        """What the worker tells of itself; silent if it is not there or takes longer than a glance."""
        if self.ready:
            try:
                told = read_counters(await asyncio.wait_for(self.reach(lambda w: w.stats.remote()), GLANCE_S))
                # Processes of several nodes may have one number, in pods more often than not.
                return replace(told, numbers={**told.numbers, "node": ray.get_runtime_context().get_node_id()})
            except (TimeoutError, WorkerLost, RayError) as error:
                log.info("no counters from a %s worker (%s)", stage, type(error).__name__)
        return Counters(stage)

    def tell(self, function: Callable[[Any], Any]) -> None:
        """Sends something to the worker, if there is one, without waiting."""
        if self._worker is not None:
            function(self._worker)

    async def check(self, function: Callable[[Any], Awaitable[T]]) -> T | None:
        """For health checks: None while a successor loads; raises only if workers keep dying."""
        if self._given_up is not None:
            raise RuntimeError("workers of this replica keep dying") from self._given_up
        if not self._ready.is_set():
            return None
        try:
            return await self.reach(function)
        except WorkerLost:
            return None

    async def _watch(self, worker: Any) -> None:
        """Ends a worker that hangs, and notices one that has died without any call."""
        watch = pulse.Watch(self._device_step_s)
        pid: int | None = None
        asked: asyncio.Future[Any] | None = None
        try:
            while worker is self._worker and self._ready.is_set():
                if asked is None:
                    asked = asyncio.ensure_future(_pulse(worker))
                await asyncio.wait([asked], timeout=pulse.LOOK_S)
                step_s = None
                if asked.done():
                    told, asked = asked.result(), None
                    pid, step_s = told.pid, told.step_s
                    self.pid = pid if worker is self._worker else self.pid
                    await asyncio.sleep(pulse.PERIOD_S)
                if pid is not None:
                    read = read_activity(pid) if pulse.needs_look(step_s) else None
                    if reason := watch.look(step_s, read):
                        self._give_up(worker, pid, reason)
        except ray.exceptions.RayActorError:
            self._lost(worker)
        except RayError as error:  # health checks go on asking
            log.warning("a worker is not watched any more (%s)", type(error).__name__)
        finally:
            if asked is not None:
                asked.cancel()

    def _give_up(self, worker: Any, pid: int, reason: str) -> None:
        """Kills a worker that hangs. It may take the kernel a while (a driver that does not return): nobody waits."""
        if worker is not self._worker:
            return
        log.error("worker %d is killed: %s", pid, reason)
        pulse.end(pid)
        self._lost(worker)
        now = asyncio.get_running_loop().time()
        while self._flying:
            self._flying.pop().reschedule(now)

    def _lost(self, worker: Any) -> None:
        if worker is not self._worker or not self._ready.is_set():
            return
        log.warning("a worker was lost; starting another")
        self._ready.clear()
        self._task = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        while True:
            self._restarts.append(time.monotonic())
            if len(self._restarts) > self.MAX_RESTARTS and time.monotonic() - self._restarts[0] < self.WINDOW_S:
                self._given_up = WorkerLost(f"{len(self._restarts)} workers died within {self.WINDOW_S:g} s")
                self._ready.set()  # whoever waits is told
                return
            try:
                await self._bring_up()
                return
            except Exception as error:
                log.error("a worker could not be started", exc_info=error)
                await asyncio.sleep(1.0)


async def _pulse(worker: Any) -> Pulse:
    return read_pulse(await worker.pulse.remote())
