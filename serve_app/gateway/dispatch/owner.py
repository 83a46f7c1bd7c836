"""One gateway owns a model's dispatch, and the others ask it: what they do.

Several queues before the same workers know of each other only by what workers report, a tenth of a second late; bursts
that reach all gateways at once then go to the same workers. So requests wait in one place. Which gateway that is, is
told by the workers: the one that plans their roles. An owner that is lost, silent or slow is done without: each gateway
has a dispatch of its own that hears the same reports, and uses it until there is an owner again. What has been sent
stays where it is, since a stream needs nothing of the dispatch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from serve_app.channel.line import Line
from serve_app.channel.served import gateway_name
from serve_app.routing.types import Decision, Prediction, Refusal, RouteRequest
from serve_app.wire.address import InboxAddress
from serve_app.wire.message import Message
from serve_app.wire.turns import (
    KEY_BYTES,
    Began,
    Enter,
    Foresee,
    Foreseen,
    FromOwner,
    Over,
    Ping,
    Pong,
    Queued,
    StreamOver,
    Turned,
    Visit,
    read_from_owner,
)

log = logging.getLogger("ray.serve")

CONNECT_S = 1.0
# An owner is asked so often whether it is there, and is lost after so long without a word.
PING_S = 0.5
SILENT_S = 2.0
# A request of which nothing has been heard by now goes on without the owner, and others do for so long.
FIRST_WORD_S = 0.5
SLOW_S = 2.0


class OwnerLost(Exception):
    """The owner does not answer any more: the request has no turn there."""


class Owner:
    """A gateway's end of the connection to one owner, for all models. Use it while :attr:`usable`."""

    def __init__(self, address: InboxAddress, own_name: str) -> None:
        self.name = gateway_name(address)
        self._address = address
        self._own_name = own_name
        self._line: Line | None = None
        self._waiting: dict[str, _Asked] = {}
        self._foreseen: dict[str, asyncio.Future[Prediction]] = {}
        self._slow_until = 0.0
        self._heard_at = 0.0
        # The kernel of a process that is stopped accepts connections: only its own word counts.
        self._answers = False
        self._task: asyncio.Task[None] | None = None

    @property
    def kept(self) -> bool:
        """Whether there is a connection, or one is tried."""
        return self._task is not None and not self._task.done()

    @property
    def usable(self) -> bool:
        """Whether requests can be sent there now. Connects, if that is still to do."""
        if not self.kept:
            self._task = asyncio.ensure_future(self._keep())
        alive = self._line is not None and self._line.alive
        return alive and self._answers and _now() >= self._slow_until

    async def enter(self, call: Enter, queued: Callable[[int], None]) -> Decision | Refusal | None:
        """Waits for the request's turn; None: wherever Serve finds a worker. Raises :class:`OwnerLost`.

        However this ends, :meth:`ended` is due.
        """
        loop = asyncio.get_running_loop()
        asked = self._waiting[call.id] = _Asked(loop.create_future(), queued)
        asked.late = loop.call_later(FIRST_WORD_S, self._late, call.id)
        self._send(call)
        try:
            return await asked.turn
        finally:
            asked.late.cancel()
            self._waiting.pop(call.id, None)

    async def foresee(self, call: Enter) -> Prediction | None:
        """What would become of a request if it came now; None where the owner does not know, or does not say."""
        answer = asyncio.get_running_loop().create_future()
        self._foreseen[call.id] = answer
        self._send(Foresee(call))
        try:
            return await asyncio.wait_for(answer, FIRST_WORD_S)
        except TimeoutError:
            return None
        finally:
            self._foreseen.pop(call.id, None)

    def began(self, request_id: str) -> None:
        self._send(Began(request_id))

    def stream_over(self, request_id: str) -> None:
        self._send(StreamOver(request_id))

    def ended(self, request_id: str, cached: int = 0, output: int = 0) -> None:
        self._send(Over(request_id, cached, output))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._line is not None:
            self._line.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._line is not None:
            self._line.send(message)

    async def _keep(self) -> None:
        """Connects, and looks whether the owner is there, until it is not."""
        loop = asyncio.get_running_loop()
        line = Line(read_from_owner, self._on_message, self._on_lost)
        address = self._address
        try:
            await asyncio.wait_for(loop.create_connection(lambda: line, address.host, address.port), CONNECT_S)
        except (OSError, TimeoutError) as error:
            log.debug("the gateway %s that owns dispatch is out of reach (%s)", self.name, type(error).__name__)
            await asyncio.sleep(PING_S)
            return
        line.send(Visit(address.secret, self._own_name))
        line.send(Ping())
        self._heard_at = _now()
        self._line = line
        try:
            while line.alive:
                await asyncio.sleep(PING_S)
                if _now() - self._heard_at > SILENT_S:
                    log.info("the gateway %s that owns dispatch is silent", self.name)
                    break
                line.send(Ping())
        finally:
            line.close()

    def _on_message(self, message: FromOwner) -> None:
        self._heard_at, self._answers = _now(), True
        if isinstance(message, Pong):
            return
        if isinstance(message, Foreseen):
            if (answer := self._foreseen.get(message.id)) is not None and not answer.done():
                answer.set_result(Prediction(message.cached_tokens, message.wait, message.ttft))
            return
        asked = self._waiting.get(message.id)
        if asked is None:
            return
        asked.late.cancel()
        if isinstance(message, Queued):
            asked.queued(message.ahead)
        elif isinstance(message, Turned):
            asked.answer(_decision(message))
        else:
            asked.answer(Refusal(message.retry_after, message.reason, message.start_worker))

    def _on_lost(self) -> None:
        self._line, self._answers = None, False
        for asked in list(self._waiting.values()):
            asked.fail()

    def _late(self, request_id: str) -> None:
        self._slow_until = _now() + SLOW_S
        asked = self._waiting.get(request_id)
        if asked is not None:
            self.ended(request_id)
            asked.fail()


class _Asked:
    """A request that waits for the owner's word."""

    __slots__ = ("late", "queued", "turn")

    def __init__(self, turn: asyncio.Future[Decision | Refusal | None], queued: Callable[[int], None]) -> None:
        self.turn = turn
        self.queued = queued
        self.late: asyncio.TimerHandle

    def answer(self, outcome: Decision | Refusal | None) -> None:
        if not self.turn.done():
            self.turn.set_result(outcome)

    def fail(self) -> None:
        if not self.turn.done():
            self.turn.set_exception(OwnerLost())


class Owners:
    """A gateway's connections to owners, by their address."""

    def __init__(self, own_name: Callable[[], str]) -> None:
        self._own_name = own_name
        self._known: dict[InboxAddress, Owner] = {}

    def at(self, address: InboxAddress) -> Owner:
        owner = self._known.get(address)
        if owner is None:
            # Gateways that have gone.
            self._known = {at: one for at, one in self._known.items() if one.kept}
            owner = self._known[address] = Owner(address, self._own_name())
        return owner


def entering(model: str, request: RouteRequest, known_as: str, now: float) -> Enter:
    """What is sent for a request."""
    deadline = None if request.deadline is None else request.deadline - now
    return Enter(
        model, request.id, request.prompt_tokens, b"".join(key[:KEY_BYTES] for key in request.keys),
        request.max_tokens, request.streams, request.tenant, known_as, request.weight, request.priority,
        max(now - request.arrived_at, 0.0), deadline, request.session, request.reject_if_busy, request.adapter,
        request.adapter_bytes, request.zone,
    )  # fmt: skip


def _decision(turned: Turned) -> Decision | None:
    if not turned.decode:
        return None
    return Decision(turned.decode, turned.prefill, turned.ttft, 0.0, turned.uncached, why=turned.why)


def _now() -> float:
    return asyncio.get_running_loop().time()
