"""What gateways say to the one of them that owns a model's dispatch, over a connection of their own.

::

    gateway -> owner    Visit        first frame
                        Enter        a request wants its turn
                        Began        its first token is there
                        StreamOver   a worker has done with one of its streams
                        Over         it has ended, or its client has left, or it goes on without the owner
                        Foresee      what would become of a request
                        Ping
    owner -> gateway    Queued       it waits
                        Turned       it has its turn
                        TurnedAway   it is refused
                        Foreseen     what would become of it
                        Pong
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from serve_app.wire.load import KEY_BYTES as KEY_BYTES
from serve_app.wire.load import Count, Name, Seconds
from serve_app.wire.message import Message, MessageDecoder


class Visit(Message, tag="visit:1", frozen=True):
    """``gateway``: what load reports call it."""

    secret: bytes
    gateway: Name


class Enter(Message, tag="enter:2", frozen=True):
    """:class:`serve_app.routing.types.RouteRequest` of ``model``, with times counted from now.

    ``keys``: the first :data:`KEY_BYTES` bytes of each. ``known_as``: the opaque id that workers have of the tenant.
    """

    model: Name
    id: Name
    prompt_tokens: Count
    keys: bytes
    max_tokens: Count
    streams: Annotated[int, Meta(ge=1, lt=1 << 20)]
    tenant: str
    known_as: Name
    weight: Annotated[float, Meta(gt=0, le=1e15)]
    priority: Literal["realtime", "batch"]
    waited_s: Seconds = 0.0
    deadline_s: float | None = None
    session: str | None = None
    reject_if_busy: bool = False
    adapter: bytes = b""
    adapter_bytes: Count = 0
    zone: Name = ""


class Began(Message, tag="began:1", frozen=True):
    id: Name


class StreamOver(Message, tag="stream-over:1", frozen=True):
    id: Name


class Over(Message, tag="over:1", frozen=True):
    """``cached`` prompt tokens and ``output`` tokens of a request that has ended."""

    id: Name
    cached: Count = 0
    output: Count = 0


class Foresee(Message, tag="foresee:1", frozen=True):
    """What would become of a request if it came now."""

    request: Enter


class Ping(Message, tag="ping:1", frozen=True):
    pass


class Pong(Message, tag="pong:1", frozen=True):
    pass


class Queued(Message, tag="queued:1", frozen=True):
    """``ahead``: prompt tokens that go before it."""

    id: Name
    ahead: Count


class Turned(Message, tag="turned:1", frozen=True):
    """:class:`serve_app.routing.types.Decision`, as far as a gateway goes by it; ``decode`` "": whichever worker Serve
    finds.
    """

    id: Name
    decode: Name = ""
    prefill: Name | None = None
    ttft: float = 0.0
    uncached: Count = 0
    why: Name = ""


class TurnedAway(Message, tag="turned-away:1", frozen=True):
    """:class:`serve_app.routing.types.Refusal`."""

    id: Name
    retry_after: float
    reason: str
    start_worker: bool = False


class Foreseen(Message, tag="foreseen:1", frozen=True):
    """:class:`serve_app.routing.types.Prediction`."""

    id: Name
    cached_tokens: Count
    wait: Seconds
    ttft: Seconds


FromGuest = Enter | Began | StreamOver | Over | Foresee | Ping
FromOwner = Queued | Turned | TurnedAway | Foreseen | Pong
read_from_guest: MessageDecoder[FromGuest] = MessageDecoder(FromGuest)
read_from_owner: MessageDecoder[FromOwner] = MessageDecoder(FromOwner)
