"""Drives one model's dispatch in a gateway: the clock, the requests that wait, timers, trace events and API errors.

The policy is :class:`serve_app.routing.dispatch.Dispatch`. Its decision is a hint that Serve's router follows if it
can; an answer never depends on it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from serve_app.channel.served import gateway_name
from serve_app.gateway.dispatch.config import dispatch_config
from serve_app.gateway.dispatch.guest import Desk
from serve_app.gateway.dispatch.loads import served_elsewhere, worker_load
from serve_app.gateway.dispatch.owner import Owner, OwnerLost, entering
from serve_app.gateway.dispatch.stats import account_stats, dispatch_stats
from serve_app.gateway.dispatch.ticket import Destination, Ticket, refused, tell_trace
from serve_app.routing.dispatch import Dispatch, Effects, Turn
from serve_app.routing.types import Decision, Prediction, Refusal, RouteRequest
from serve_app.tasks.estimate import Foreseen
from serve_app.tasks.model import ServedModel
from serve_app.wire.address import InboxAddress
from serve_app.wire.generate import HERE, PrefillAt
from serve_app.wire.load import LoadReport

# How often a request that waits for a worker looks whether one will ever report.
LOOK_S = 0.5
# Accounts whose opaque ids are remembered for owners of dispatch.
KNOWN = 10_000


class Dispatcher:
    """``report`` what workers say, ``enter`` with a request, ``finish`` when it has ended in whatever way.

    ``start_worker()`` starts a first worker without a request; ``hurry()`` asks workers for reports, now. ``owner_at``:
    the connection to a gateway that owns dispatch; ``guests()``: names of the gateways that ask this one.
    """

    def __init__(
        self,
        model: ServedModel,
        clock: Callable[[], float] = time.monotonic,
        name: Callable[[], str] = lambda: "",
    ) -> None:
        """``name``: what load reports call this gateway."""
        self._model = model
        self._clock = clock
        self._name = name
        self.start_worker: Callable[[], None] = lambda: None
        self.hurry: Callable[[], None] = lambda: None
        self.owner_at: Callable[[InboxAddress], Owner | None] = lambda address: None
        self.guests: Callable[[], frozenset[str]] = frozenset
        self.policy = Dispatch(dispatch_config(model))
        # Prompt tokens by where their K/V came from: computed, the worker's own blocks, a tier of the pool.
        self._sources: dict[str, int] = {}
        self._waiting: dict[str, Callable[[Turn], None]] = {}
        # Where the owner of dispatch listens, as each worker process tells it, and what most of them tell.
        self._told: dict[str, InboxAddress | None] = {}
        self._owner: InboxAddress | None = None
        self._turns = Counter[str]()  # had from an owner, and given to guests
        self._known_as: dict[str, str] = {}  # the opaque ids that workers have of accounts
        self._timer: asyncio.TimerHandle | None = None
        self._reported = asyncio.Event()

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that one of a request's keys stands for."""
        return self.policy.config.router.chunk_tokens

    @property
    def weights(self) -> bytes:
        """What the keys of most workers' K/V start from; empty until one has reported."""
        return self.policy.router.beliefs.weights

    def now(self) -> float:
        """On the clock of deadlines."""
        return self._clock()

    # -- workers -------------------------------------------------------------------------------------------------

    def report(self, process: str, report: LoadReport) -> None:
        """A worker, known by its process, tells of its load."""
        now, own, guests = self._clock(), self._name(), self.guests()
        self._owned_by(process, None if report.planner in ("", own) else report.owner)
        effects = self.policy.report(
            process,
            worker_load(report, now),
            now,
            planning=report.planner in ("", own),
            # What guests have to do comes here, and is charged here.
            gateways=max(1, report.gateways - len(guests)),
            served=served_elsewhere(report, guests | {own}),
        )
        self._apply(effects)
        self._reported.set()

    def lost(self, process: str) -> None:
        """A worker's connection has ended."""
        self.policy.lost(process, self._clock())
        if process in self._told:
            del self._told[process]
            self._count_owners()

    def expect_reports(self) -> None:
        """Workers are asked to report here from now on."""
        self.policy.absence.asked = True

    def told(self, listens: bool) -> None:
        """Whether a worker has just heard where to report."""
        if not self.policy.workers.loads:
            self.policy.absence.told(listens, self._clock())

    def know(self, tenant: str, account: str) -> None:
        """``tenant``: the opaque id that workers have of the account."""
        self.policy.elsewhere.know(tenant, account)
        if len(self._known_as) >= KNOWN:
            self._known_as.clear()
        self._known_as[account] = tenant

    def needed(self) -> dict[str, float]:
        """Replicas of each stage that this gateway's requests need, as fractions."""
        return self.policy.workers.needed(self._clock())

    @property
    def roles(self) -> dict[str, str]:
        """What this gateway wants workers to prefer; empty where another gateway plans."""
        return dict(self.policy.workers.roles)

    @property
    def stages(self) -> set[str]:
        """Stages with a worker that requests can be sent to."""
        return self.policy.workers.stages

    # -- requests ------------------------------------------------------------------------------------------------

    async def enter(self, ticket: Ticket) -> None:
        """Waits until it is the request's turn. Raises :class:`OutOfCapacity`, mostly at once.

        However this ends, :meth:`finish` is due.
        """

        def queued(ahead: int) -> None:
            ticket.trace.event("queued", ahead_tokens=ahead)

        if (owner := self._usable_owner()) is not None and await self._enter_at(owner, ticket, queued):
            return
        ticket.turn = asyncio.get_running_loop().create_future()
        self.arrive(ticket.request, partial(self._resolve, ticket), queued)
        await ticket.turn

    def arrive(
        self, request: RouteRequest, turned: Callable[[Turn], None], queued: Callable[[int], None] = lambda ahead: None
    ) -> None:
        """A request of this gateway or of a guest. ``turned`` is called once unless it finishes before; ``queued``
        before that with the prompt tokens that go first, unless it is refused at once.
        """
        self._waiting[request.id] = turned
        effects = self.policy.arrive(request, self._clock())
        if effects.ahead is not None:
            queued(effects.ahead)
        self._apply(effects)
        if not self.policy.workers.loads:
            self.hurry()

    async def _enter_at(self, owner: Owner, ticket: Ticket, queued: Callable[[int], None]) -> bool:
        """Waits for the turn at another gateway; False: that is gone, and the request has had none."""
        request = ticket.request
        ticket.owner = owner
        call = entering(self._model.id, request, self._known_as.get(request.tenant, ""), self._clock())
        try:
            outcome = await owner.enter(call, queued)
        except OwnerLost:
            ticket.owner = None
            return False
        if isinstance(outcome, Refusal):
            if outcome.start_worker:
                self.start_worker()
            raise refused(outcome)
        ticket.decision, ticket.placed = outcome, True
        self._turns["placed_by_owner"] += 1
        if outcome is not None:
            self.policy.router.learn(request, outcome, self._clock())
        tell_trace(ticket)
        return True

    def desk(self) -> Desk | None:
        """For gateways that ask this one; None while no worker reports here. Those that ask know of some."""
        if not self.policy.workers.loads:
            return None

        def ended(request_id: str, cached: int, output: int) -> None:
            self._waiting.pop(request_id, None)
            self._apply(self.policy.finish(request_id, self._clock(), cached=cached, output=output))

        def began(request_id: str) -> None:
            self.policy.started(request_id, self._clock())

        def arrive(request: RouteRequest, turned: Callable[[Turn], None], queued: Callable[[int], None]) -> None:
            def turn(turn: Turn) -> None:
                self._turns["placed_for_others"] += turn.refusal is None
                turned(turn)

            self.arrive(request, turn, queued)

        def predict(request: RouteRequest) -> Prediction | None:
            return self.policy.predict(request, self._clock())

        return Desk(self._clock, arrive, self.know, began, self.policy.stream_ended, ended, predict)

    def waiting(self) -> str:
        """What a request has to wait for before anything can be done about it, in words; "" for nothing."""
        if self.policy.workers.loads or not self._model.scales_to_zero:
            return ""
        return f"{self._model.id} is starting, about {self.policy.absence.left(self._clock()):.0f} s left"

    async def foresee(self, request: RouteRequest) -> Foreseen:
        """What would become of the request if it came now, by the queue that it would stand in. While no worker is up
        nothing is known, but for how long a start takes.
        """
        found = self.policy.predict(request, self._clock())
        if (owner := self._usable_owner()) is not None:
            known_as = self._known_as.get(request.tenant, "")
            found = await owner.foresee(entering(self._model.id, request, known_as, self._clock())) or found
        if found is not None:
            return Foreseen(found.cached_tokens, request.expected_output_tokens, found.wait, found.ttft)
        wait = self.policy.absence.left(self._clock()) if self._model.scales_to_zero else None
        return Foreseen(0, request.expected_output_tokens, wait)

    def destination(self, ticket: Ticket) -> Destination:
        """Where the request is sent."""
        decision, stage = ticket.decision, self.policy.workers.stage
        if decision is None:
            # The first worker of a model that starts for this request must not wait for a second one to prefill.
            return Destination(prefill=HERE if self._model.scales_to_zero else None)
        prefill = HERE
        if decision.prefill is not None:
            prefill = PrefillAt(stage(decision.prefill) or "prefill", decision.prefill)
        return Destination(stage(decision.decode), decision.decode, prefill)

    async def move(self, ticket: Ticket, gone: Decision | None) -> None:
        """The worker that ``gone`` named is no more: chooses another, once there is one. The request has had its turn
        and does not stand in the queue again.
        """
        if ticket.owner is not None:
            # Here is as good as there: what is to be decided has no queue before it.
            ticket.owner.ended(ticket.request.id)
            ticket.owner = None
            self.policy.adopt(ticket.request, ticket.decision, started=ticket.started)
        # Of several streams each may tell of the same loss.
        if ticket.decision is gone:
            ticket.decision = self.policy.move(ticket.request.id, self._clock())
        while ticket.decision is None and self.policy.can_wait(ticket.request.id, self._clock()):
            self._reported.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._reported.wait(), LOOK_S)
            if ticket.decision is None:
                ticket.decision = self.policy.move(ticket.request.id, self._clock())
        tell_trace(ticket)

    def gone(self, ticket: Ticket) -> bool:
        """Whether the worker that the request was sent to has ended its connection, and there are others."""
        workers, leaving = self.policy.router.fleet.workers, self.policy.workers.leaving
        there = ticket.decision is None or ticket.decision.decode in workers or ticket.decision.decode in leaving
        return bool(workers) and not there

    def start(self, ticket: Ticket) -> None:
        """The first token is there."""
        if ticket.owner is not None and not ticket.started:
            ticket.owner.began(ticket.request.id)
        ticket.started = True
        self.policy.started(ticket.request.id, self._clock())

    def stream_ended(self, ticket: Ticket) -> None:
        """The worker has done with one of the request's streams, though its client may still read."""
        if ticket.owner is not None:
            ticket.owner.stream_over(ticket.request.id)
        self.policy.stream_ended(ticket.request.id)

    def finish(self, ticket: Ticket, *, cached: int = 0, output: int = 0) -> None:
        """The request has ended, or has left before it began; ``cached`` prompt tokens and ``output`` tokens."""
        if ticket.owner is not None:
            ticket.owner.ended(ticket.request.id, cached, output)
            ticket.owner = None
        self._waiting.pop(ticket.request.id, None)
        self._apply(self.policy.finish(ticket.request.id, self._clock(), cached=cached, output=output))

    def count_prompt(self, sources: dict[str, int]) -> None:
        """Where a prompt's K/V came from, in tokens by source."""
        for source, tokens in sources.items():
            if tokens > 0:
                self._sources[source] = self._sources.get(source, 0) + tokens

    # -- statistics ----------------------------------------------------------------------------------------------

    def stats(self, account: str | None = None) -> dict[str, Any]:
        """Queues, choices and roles as this gateway sees them; with ``account``, only what concerns it."""
        if account is not None:
            return account_stats(self.policy, account)
        told = dispatch_stats(self.policy, self._clock())
        by_owner, for_others = self._turns["placed_by_owner"], self._turns["placed_for_others"]
        return told | {
            "placed": told["placed"] + by_owner - for_others,
            "placed_by_owner": by_owner,
            "placed_for_others": for_others,
            "prompt_tokens_by_source": dict(self._sources),
            "owner": self._name() if self._owner is None else gateway_name(self._owner),
        }

    def lengths(self) -> dict[str, int]:
        """Requests that wait here, by account."""
        return self.policy.queue.lengths()

    # -- inside --------------------------------------------------------------------------------------------------

    def _apply(self, effects: Effects) -> None:
        """Wakes the requests that have had their turn, and sets the timer."""
        for turn in effects.turns:
            self._waiting.pop(turn.request_id)(turn)
        if effects.tick_at is not None and self._timer is None:
            delay = max(effects.tick_at - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _owned_by(self, process: str, owner: InboxAddress | None) -> None:
        if process not in self._told or self._told[process] != owner:
            self._told[process] = owner
            self._count_owners()

    def _count_owners(self) -> None:
        # Workers hear of a gateway that comes or goes one after the other.
        told = Counter(self._told.values()).most_common(1)
        self._owner = told[0][0] if told else None

    def _usable_owner(self) -> Owner | None:
        """The gateway that requests should have their turns from, if it can be asked now and is not this one."""
        if self._owner is None or not self.policy.workers.loads:
            return None
        owner = self.owner_at(self._owner)
        return owner if owner is not None and owner.usable else None

    def _tick(self) -> None:
        self._timer = None
        self._apply(self.policy.tick(self._clock()))

    def _resolve(self, ticket: Ticket, turn: Turn) -> None:
        assert ticket.turn is not None
        if turn.refusal is None:
            ticket.decision, ticket.placed = turn.decision, True
            tell_trace(ticket)
        elif turn.refusal.start_worker:
            self.start_worker()
        # A future that is done belongs to a client that has just left; its finish() is under way.
        if ticket.turn.done():
            return
        if turn.refusal is None:
            ticket.turn.set_result(None)
        else:
            ticket.turn.set_exception(refused(turn.refusal))
