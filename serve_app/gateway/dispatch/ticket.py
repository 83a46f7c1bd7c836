"""A request's way through a gateway's dispatcher, and where it is sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from serve_app.api.errors import OutOfCapacity
from serve_app.gateway.dispatch.owner import Owner
from serve_app.routing.types import Decision, Refusal, RouteRequest
from serve_app.state.kept.traces import Trace
from serve_app.wire.generate import PrefillAt


@dataclass(slots=True)
class Ticket:
    """A request's way through the dispatcher. ``decision`` None: Serve chooses, since no worker reports. ``owner``: the
    gateway that it has its turn from, if that is not this one.
    """

    request: RouteRequest
    trace: Trace
    decision: Decision | None = None
    placed: bool = False
    started: bool = False
    turn: asyncio.Future[None] | None = None
    owner: Owner | None = None


@dataclass(slots=True, frozen=True)
class Destination:
    """A stage and one of its replicas ("": whichever Serve chooses), and who prefills (None: whom that one chooses)."""

    stage: str = ""
    replica: str = ""
    prefill: PrefillAt | None = None


def tell_trace(ticket: Ticket) -> None:
    """Where the request goes, for its trace."""
    decision = ticket.decision
    if decision is None:
        ticket.trace.event("routed", why="no worker reports")
        return
    ticket.trace.event(
        "routed",
        why=decision.why,
        decode=decision.decode,
        prefill=decision.prefill,
        expected_ttft_ms=round(decision.ttft * 1e3, 1),
        expected_uncached_tokens=decision.uncached,
    )


def refused(refusal: Refusal) -> OutOfCapacity:
    """What a client sees of it."""
    reason = f"Capacity temporarily exceeded, please try again: {refusal.reason}."
    return OutOfCapacity(reason, retry_after=refusal.retry_after)
