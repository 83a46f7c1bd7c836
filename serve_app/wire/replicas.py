"""What gateways and replicas tell each other beside requests, and replicas their workers."""

from __future__ import annotations

from typing import Any

from serve_app.wire.address import InboxAddress
from serve_app.wire.message import Message, MessageDecoder


class Nothing(Message, tag="nothing:1", frozen=True):
    """For a call or an answer that says nothing but that it has come."""


class Subscribe(Message, tag="subscribe:3", frozen=True):
    """Gateway -> replicas: wants load reports at ``inbox`` for ``lease_s`` seconds. ``needed``: replicas of each stage
    that the gateway's requests need; ``roles``: what it wishes which replica to prefer. ``plans``: it may be
    the one whose wishes count; one that has batches alone has none. ``since``: the minute in which it began.
    """

    inbox: InboxAddress
    lease_s: float
    needed: dict[str, float] = {}
    roles: dict[str, str] = {}
    plans: bool = True
    since: int = 0


class Subscribed(Message, tag="subscribed:2", frozen=True):
    """``replica``: Serve's id of the one that answers. ``listens``: its worker is up and has heard of it."""

    replica: str
    listens: bool = True


class Listen(Message, tag="listen:4", frozen=True):
    """Replica -> its worker: what :class:`Subscribe` means for it. ``replica``: Serve's id; ``role``: what it is by the
    catalogue; ``wish``: what that gateway wishes it to prefer; ``leaving``: Serve is taking the replica away.
    """

    inbox: InboxAddress
    lease_s: float
    replica: str
    role: str
    wish: str | None = None
    plans: bool = True
    leaving: bool = False
    since: int = 0


class Counters(Message, tag="counters:1", frozen=True):
    """What a worker tells of itself, for people who look. ``pid`` 0: it has nothing to tell just now, because it is
    being replaced or held up.
    """

    stage: str
    pid: int = 0
    numbers: dict[str, Any] = {}

    @property
    def silent(self) -> bool:
        return not self.pid

    def shown(self) -> dict[str, Any]:
        """As ``GET /v1/status`` shows it."""
        return {"stage": self.stage, **self.numbers, "pid": self.pid}


class Pulse(Message, tag="pulse:1", frozen=True):
    """A worker's answer to its replica that it is there: process ``pid``, in its present step for ``step_s`` seconds,
    0 between two steps.
    """

    pid: int
    step_s: float = 0.0


class AllCounters(Message, tag="all-counters:1", frozen=True):
    workers: tuple[Counters, ...] = ()


read_nothing: MessageDecoder[Nothing] = MessageDecoder(Nothing)
read_subscribe: MessageDecoder[Subscribe] = MessageDecoder(Subscribe)
read_subscribed: MessageDecoder[Subscribed] = MessageDecoder(Subscribed)
read_listen: MessageDecoder[Listen] = MessageDecoder(Listen)
read_counters: MessageDecoder[Counters] = MessageDecoder(Counters)
read_pulse: MessageDecoder[Pulse] = MessageDecoder(Pulse)
read_all_counters: MessageDecoder[AllCounters] = MessageDecoder(AllCounters)
