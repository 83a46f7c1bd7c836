"""Streams that can be resumed, as gateways and the store speak of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Ending = Literal["done", "failed", "cancelled"]
# The other states. Lost: it has ended too many gateways.
RUNNING, CANCELLING, LOST, EXPIRED = "running", "cancelling", "lost", "expired"


@dataclass(slots=True, frozen=True)
class Head:
    """A stream as it is when it begins; ``request``: bytes that its gateway understands."""

    id: str
    account: str
    created: float
    keep_s: float | None
    request: bytes


@dataclass(slots=True, frozen=True)
class StreamPart:
    """The ``number``-th part of stream ``id``: frames, each with its own number and the last of them ``upto``, and the
    tokens behind them. ``head``: with the first part. ``ending``: with the last, and until when it is kept, and the
    columns of the ``entries`` of the ledger that are due with it.
    """

    id: str
    epoch: int
    number: int
    upto: int
    frames: bytes
    trail: bytes
    head: Head | None = None
    ending: Ending | None = None
    expires: float | None = None
    entries: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True, frozen=True)
class Running:
    """What the store says of a stream to the gateway that runs it."""

    id: str
    epoch: int
    seen: float
    cancelling: bool


@dataclass(slots=True, frozen=True)
class Shown:
    """A stream as a reader finds it: ``parts`` hold the frames beyond those that it has."""

    status: str
    parts: list[bytes]


@dataclass(slots=True, frozen=True)
class Taken:
    """A stream whose gateway is gone, with everything that is needed to go on; it is the taker's from now on."""

    head: Head
    epoch: int
    cancelling: bool
    parts: list[tuple[bytes, bytes]]


@dataclass(slots=True, frozen=True)
class KeyClaim:
    """An account's key, as the gateway ``owner`` has it since ``at``, which tells one claim from the next."""

    owner: str
    account: str
    key: str
    at: float


@dataclass(slots=True, frozen=True)
class Known:
    """A request that is known by its key: its ``print`` and its ``answer``, None while it is under way."""

    print: str
    answer: bytes | None
