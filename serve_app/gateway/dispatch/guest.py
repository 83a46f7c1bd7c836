"""One gateway owns a model's dispatch, and the others ask it: what the owner does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from serve_app.channel.line import Line
from serve_app.routing.dispatch import Turn
from serve_app.routing.types import Prediction, RouteRequest
from serve_app.wire.turns import (
    KEY_BYTES,
    Began,
    Enter,
    Foresee,
    Foreseen,
    FromGuest,
    Ping,
    Pong,
    Queued,
    StreamOver,
    Turned,
    TurnedAway,
    read_from_guest,
)

log = logging.getLogger("ray.serve")

# A gateway that asks says something twice a second. One that says nothing between so many looks in a row is stopped or
# cut off, and its requests would hold places for ever. Looks are counted, so that this process may have stood still.
LOOK_S = 2.0
SILENT_LOOKS = 3
# No wait is told as longer.
LONGEST_S = 1e6


class Guest:
    """One gateway that asks for turns. ``desk(model)`` is the dispatch it asks, None for a model that
    is not served here.
    """

    def __init__(self, gateway: str, desk: Callable[[str], Desk | None], on_lost: Callable[[Guest], None]) -> None:
        self.gateway = gateway
        self._desk = desk
        self._on_lost = on_lost
        self._live: dict[str, Desk] = {}
        self._silent = 0
        self._look_again()
        self.line = Line(read_from_guest, self._on_message, self._lost)

    def _on_message(self, message: FromGuest) -> None:
        self._silent = 0
        if isinstance(message, Ping):
            self.line.send(Pong())
        elif isinstance(message, Enter):
            self._enter(message)
        elif isinstance(message, Foresee):
            self._foresee(message.request)
        elif (desk := self._live.get(message.id)) is None:
            return
        elif isinstance(message, Began):
            desk.began(message.id)
        elif isinstance(message, StreamOver):
            desk.stream_over(message.id)
        else:
            del self._live[message.id]
            desk.ended(message.id, message.cached, message.output)

    def _enter(self, call: Enter) -> None:
        desk = self._desk(call.model)
        if desk is None or call.id in self._live:
            return  # no word: the other gateway goes on by itself
        self._live[call.id] = desk
        desk.arrive(call, self._turned, lambda ahead: self.line.send(Queued(call.id, ahead)))

    def _foresee(self, call: Enter) -> None:
        desk = self._desk(call.model)
        found = None if desk is None else desk.foresee(call)
        if found is not None:
            wait, ttft = (min(seconds, LONGEST_S) for seconds in (found.wait, found.ttft))
            self.line.send(Foreseen(call.id, found.cached_tokens, wait, ttft))

    def _turned(self, turn: Turn) -> None:
        if turn.refusal is not None:
            refusal = turn.refusal
            self._live.pop(turn.request_id, None)
            self.line.send(TurnedAway(turn.request_id, refusal.retry_after, refusal.reason, refusal.start_worker))
        elif turn.decision is None:
            self.line.send(Turned(turn.request_id))
        else:
            d = turn.decision
            self.line.send(Turned(turn.request_id, d.decode, d.prefill, d.ttft, d.uncached, d.why))

    def _look_again(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        if self._silent >= SILENT_LOOKS:
            log.info("the gateway %s that has its turns from here is silent", self.gateway)
            self.line.close()
            return
        self._silent += 1
        self._look_again()

    def _lost(self) -> None:
        self._watch.cancel()
        # What it has sent shows in the workers' reports. The end of one may give another its turn or its refusal.
        live, self._live = self._live, {}
        for request_id, desk in live.items():
            with suppress(Exception):
                desk.ended(request_id, 0, 0)
        self._on_lost(self)


class Guests:
    """The gateways that ask this one now."""

    def __init__(self, desk: Callable[[str], Desk | None]) -> None:
        self._desk = desk
        self._here: set[Guest] = set()

    def visit(self, gateway: str) -> Line:
        """A gateway has connected."""
        guest = Guest(gateway, self._desk, self._here.discard)
        self._here.add(guest)
        return guest.line

    def names(self) -> frozenset[str]:
        return frozenset(guest.gateway for guest in self._here)


class Desk:
    """One model's dispatch as guests reach it. Times are on ``clock``."""

    def __init__(
        self,
        clock: Callable[[], float],
        arrive: Callable[[RouteRequest, Callable[[Turn], None], Callable[[int], None]], None],
        know: Callable[[str, str], None],
        began: Callable[[str], None],
        stream_over: Callable[[str], None],
        ended: Callable[[str, int, int], None],
        predict: Callable[[RouteRequest], Prediction | None],
    ) -> None:
        self._clock = clock
        self._arrive = arrive
        self._know = know
        self.began = began
        self.stream_over = stream_over
        self.ended = ended
        self._predict = predict

    def foresee(self, call: Enter) -> Prediction | None:
        """What would become of it if it came now; None while nothing is known."""
        return self._predict(_request(call, self._clock()))

    def arrive(self, call: Enter, turned: Callable[[Turn], None], queued: Callable[[int], None]) -> None:
        """``turned`` is called with its turn; ``queued`` before with the prompt tokens that go first."""
        if call.known_as:
            self._know(call.known_as, call.tenant)
        self._arrive(_request(call, self._clock()), turned, queued)


def _request(call: Enter, now: float) -> RouteRequest:
    keys = [call.keys[at : at + KEY_BYTES] for at in range(0, len(call.keys), KEY_BYTES)]
    return RouteRequest(
        call.id,
        call.prompt_tokens,
        keys,
        max_tokens=call.max_tokens,
        streams=call.streams,
        session=call.session,
        tenant=call.tenant,
        weight=call.weight,
        priority=call.priority,
        arrived_at=now - call.waited_s,
        deadline=None if call.deadline_s is None else now + call.deadline_s,
        reject_if_busy=call.reject_if_busy,
        adapter=call.adapter,
        adapter_bytes=call.adapter_bytes,
        zone=call.zone,
    )
