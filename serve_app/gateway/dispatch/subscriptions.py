"""Asks every text worker for its load again and again, since workers come and go without telling gateways."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from serve_app.channel.inbox import TokenInbox
from serve_app.gateway.models import Models
from serve_app.tasks.calls import AskAll, Call
from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import SUBSCRIBE, WAKE
from serve_app.wire.replicas import Nothing, Subscribe

log = logging.getLogger("ray.serve")

LEASE_S = 15.0
# A worker that has just come up is found this soon; three renewals may fail before a lease ends.
PERIOD_S = 4.0
# Where replicas are expected and none has answered yet, and where the roles that workers should prefer have changed.
EAGER_S = 0.5
# The least time between two rounds, however many requests wait for a report.
HURRY_S = 0.02
TIMEOUT_S = 5.0
# Share of a replica's time that requests must need before a stage without replicas gets its first.
WAKE_ABOVE = 0.1
STAGES = ("decode", "prefill")


class Wanted(NamedTuple):
    """``needed``: the replicas by stage that requests need, for the autoscaler; ``roles``: what each replica should
    prefer; ``silent``: stages of which no worker reports.
    """

    needed: dict[str, float] = {}
    roles: dict[str, str] = {}
    silent: frozenset[str] = frozenset()


class Subscriptions:
    """Renews the lease with every replica of a stage, and brings it what ``plan(model)`` gives. ``told(model,
    listens)``: whether a worker of the stage that requests are sent to has heard where to report.
    """

    def __init__(
        self,
        models: Models,
        inbox: TokenInbox,
        ask_all: AskAll,
        plan: Callable[[ServedModel], Wanted],
        told: Callable[[ServedModel, bool], None] = lambda model, listens: None,
    ) -> None:
        self._plan = plan
        self._told = told
        self._models = models
        self._inbox = inbox
        self._ask_all = ask_all
        self._due: dict[tuple[str, str], float] = {}
        self._roles: dict[tuple[str, str], Any] = {}  # as last sent
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._plans = True
        self._since = int(time.time() // 60)
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, *, plans: bool = True) -> None:
        """``plans``: this gateway may plan the roles of all workers; see :class:`serve_app.wire.replicas.Subscribe`."""
        self._plans = plans
        self._task = asyncio.ensure_future(self._watch())

    def hurry(self) -> None:
        """A request waits for a report."""
        self._hurried.set()

    async def _watch(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            for model in self._models:
                stages = [stage for stage in STAGES if model.ready and stage in model.profile.stages]
                plan = self._plan(model) if stages else Wanted()
                for stage in stages:
                    # A replica that does not answer holds up nobody else.
                    running = self._running.get((model.id, stage))
                    if (running is None or running.done()) and self._is_due(model, stage, plan, now):
                        self._running[model.id, stage] = asyncio.ensure_future(self._subscribe(model, stage, plan))
            await asyncio.sleep(HURRY_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), EAGER_S - HURRY_S)
            self._hurried.clear()

    def _is_due(self, model: ServedModel, stage: str, plan: Wanted, now: float) -> bool:
        key = (model.id, stage)
        if self._due.get(key, 0.0) <= now or self._roles.get(key) != plan.roles:
            return True
        return stage in plan.silent and _expected(model, stage)

    async def _subscribe(self, model: ServedModel, stage: str, plan: Wanted) -> None:
        call = Subscribe(self._inbox.address, LEASE_S, plan.needed, plan.roles, self._plans, self._since)
        self._roles[model.id, stage] = plan.roles
        again, listens = PERIOD_S, False
        try:
            answers = await asyncio.wait_for(self._ask_all(model, SUBSCRIBE, call, stage), TIMEOUT_S)
            listens = any(answer.listens for answer in answers)
        except Exception as error:  # no replica, or one that is going
            if _expected(model, stage):
                again = EAGER_S
            log.debug("no load reports from %s %s for now (%s)", model.id, stage, type(error).__name__)
        self._due[(model.id, stage)] = asyncio.get_running_loop().time() + again
        if stage == model.first_stage:
            self._told(model, listens)


def _expected(model: ServedModel, stage: str) -> bool:
    """Whether the stage has replicas, or soon will."""
    return bool(model.inflight or model.profile.stages[stage].min_replicas)


class Wake:
    """Starts the first replica of a stage that has none. Requests start decode; a prefill stage without workers gets
    no requests, so it would never start by itself.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._calls: dict[tuple[str, str], asyncio.Task[Any]] = {}

    def first(self, model: ServedModel) -> None:
        """Starts the model's first worker: a request was turned away because there is none."""
        self._start(model, model.first_stage)

    def where_needed(self, model: ServedModel, needed: dict[str, float], present: set[str]) -> None:
        """``present``: stages of which a worker reports."""
        for stage, replicas in needed.items():
            if replicas > WAKE_ABOVE and present and stage not in present:
                self._start(model, stage)

    def _start(self, model: ServedModel, stage: str) -> None:
        running = self._calls.get((model.id, stage))
        if running is None or running.done():
            self._calls[(model.id, stage)] = asyncio.ensure_future(self._quietly(model, stage))

    async def _quietly(self, model: ServedModel, stage: str) -> None:
        try:
            await self._call(model, WAKE, Nothing(), stage)
        except Exception as error:  # the next round tries again
            log.debug("%s %s does not start (%s)", model.id, stage, type(error).__name__)
