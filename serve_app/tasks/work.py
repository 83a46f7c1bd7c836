"""A piece of work from its begin to its settlement, whatever its task and dialect and however it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import Usage
from serve_app.catalog.pricing import neurons
from serve_app.state.accounts import Caller
from serve_app.state.traces import Trace, Traces
from serve_app.tasks.backend import Backend
from serve_app.tasks.calls import Call
from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import C, Method, R

log = logging.getLogger("ray.serve")

# A request whose worker is lost goes on with another one.
MAX_ATTEMPTS = 3

# left: its client went. failed: after it had begun; refused: before.
Status = Literal["done", "refused", "failed", "left"]


class WorkerGone(RuntimeError):
    """The replica or worker that had the request is gone; another may continue it."""


@dataclass(slots=True, frozen=True)
class Settled:
    """A piece of work that has ended."""

    caller: Caller
    model: str
    task: str
    usage: Usage
    status: Status
    request_id: str
    seconds: float


class Settlement:
    """Where every piece of work ends, exactly once. ``subscribers`` hear of it: counters, and whoever keeps books."""

    def __init__(self, *subscribers: Callable[[Settled], None]) -> None:
        self.subscribers = list(subscribers)

    def settle(
        self, caller: Caller, model: ServedModel, usage: Usage, status: Status, *, request_id: str, seconds: float
    ) -> None:
        """A subscriber that fails keeps the others from nothing."""
        settled = Settled(caller, model.id, model.record.task, usage, status, request_id, seconds)
        for subscriber in self.subscribers:
            try:
                subscriber(settled)
            except Exception:
                log.exception("a settled request could not be counted")


@dataclass(slots=True)
class Work:
    """One piece of work under way. Whoever runs it keeps ``usage`` up to date, since its client may leave at any time,
    and sets ``placed`` once a worker has been chosen for it.
    """

    caller: Caller
    model: ServedModel
    salt: bytes = b""
    trace: Trace = field(default_factory=Trace)
    usage: Usage = field(default_factory=Usage)
    placed: bool = False
    traces: Traces | None = None

    def hold(self) -> None:
        """Keeps the trace open beyond the settlement, for who still has something to tell; :meth:`release` is due."""
        self.trace.users += 1

    def release(self) -> None:
        if self.traces is not None:
            self.traces.release(self.trace)


@dataclass(slots=True)
class Runtime:
    """What a gateway lends to tasks.

    ``call`` reaches a replica of a model. ``salt(account)`` keeps tenants' caches apart. ``settling(settle)`` has
    the work at hand settled, once that is this gateway's to do.
    """

    call: Call
    backend: Callable[[ServedModel], Backend]
    settlement: Settlement
    max_inflight: int
    salt: Callable[[str], bytes] = lambda account: b""
    traces: Traces | None = None
    request_id: Callable[[], str] = lambda: ""
    settling: Callable[[Callable[[], None]], None] = lambda settle: settle()

    @contextmanager
    def work(
        self,
        model: ServedModel,
        caller: Caller,
        *,
        streams: int = 1,
        reject_if_busy: bool = False,
        request_id: str | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> Iterator[Work]:
        """A piece of work that holds ``streams`` places of the model; ``facts`` begin its trace.

        It is settled when the block ends, in whatever way: an exception means failed, or refused where it had not
        started; a block that is left without one of its own (a cancelled task, a closed generator) means left.
        """
        own_id = self.request_id() if request_id is None else request_id
        began = time.monotonic()
        work = Work(caller, model, self.salt(caller.account), traces=self.traces)
        if self.traces is not None:
            work.trace = self.traces.begin(own_id, caller.account, model.id)
        work.trace.event("received", **facts)
        status: Status = "left"
        try:
            with model.place(caller, self.max_inflight, streams=streams, reject_if_busy=reject_if_busy):
                yield work
            status = "done"
        except OutOfCapacity as refused:
            status = "failed" if work.placed else "refused"
            work.trace.event("answered", status=429, retry_after_s=refused.retry_after)
            raise
        except Exception:
            status = "failed"
            raise
        finally:
            usage, price = work.usage, model.record.price
            usage.neurons = neurons(price, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            if self.traces is not None:
                tokens = {"cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens}
                self.traces.end(work.trace, status, **tokens)
            seconds = time.monotonic() - began
            settle = partial(self.settlement.settle, caller, model, usage, status)
            self.settling(partial(settle, request_id=own_id, seconds=seconds))

    async def call_retried(self, model: ServedModel, method: Method[C, R], call: C) -> R:
        """:attr:`call` of work that may be done twice: a lost worker costs time and nothing else."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self.call(model, method, call)
            except WorkerGone:
                await asyncio.sleep(0.2 * attempt)
        raise OutOfCapacity("The workers of this model were lost repeatedly; please try again.", retry_after=5.0)
