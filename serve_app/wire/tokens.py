"""Messages of the token channel, one frame each (:mod:`serve_app.channel.frames`).

::

    worker -> gateway   Hello        first frame of every connection
                        Tokens       the new tokens of one engine step, of all streams of that gateway
                        Ended        how requests that came together have ended, each when it has
                        LoadReport   to gateways that have subscribed (serve_app.wire.load)
                        Bye
    gateway -> gateway  Visit        first frame of a connection of another kind (serve_app.wire.turns)
    gateway -> worker   Ack          cumulative, sent lazily
                        Pause        a reader is slow
                        Resume       it has caught up: go on from there
                        Closed       nobody reads these: stop making tokens
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from serve_app.sampling_params import TokenLogprobs
from serve_app.wire.load import LoadReport
from serve_app.wire.message import Message, MessageDecoder
from serve_app.wire.turns import Visit

Offset = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class TokenItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Tokens of one stream from ``offset`` on (counted from 0): what a step made, or the end of the stream, or both.

    ``logprobs``: one per token, if asked for. ``cached``: with a request's first token, how many of the prompt's tokens
    were found stored.
    """

    stream_id: str
    offset: Offset
    ids: tuple[TokenId, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached: Offset | None = None

    @property
    def end(self) -> int:
        return self.offset + len(self.ids)


class Hello(Message, tag="hello:2", frozen=True):
    secret: bytes
    worker_id: str


class Tokens(Message, tag="tokens:2", frozen=True):
    items: tuple[TokenItem, ...]


class Ending(NamedTuple):
    """``result``: what a call of its own would have answered, encoded (:class:`serve_app.wire.generate.Generated` or
    :class:`~serve_app.wire.generate.Failed`).
    """

    stream_id: str
    result: bytes


class Ended(Message, tag="ended:1", frozen=True):
    """Not acknowledged: the call that brought the requests answers the same when the last of them has ended."""

    streams: tuple[Ending, ...]


class Bye(Message, tag="bye:1", frozen=True):
    pass


class Acked(NamedTuple):
    """``offset``: the next one expected."""

    stream_id: str
    offset: int
    finished: bool


class Ack(Message, tag="ack:1", frozen=True):
    streams: tuple[Acked, ...]


class Pause(Message, tag="pause:1", frozen=True):
    streams: tuple[str, ...]


class Position(NamedTuple):
    stream_id: str
    offset: int


class Resume(Message, tag="resume:1", frozen=True):
    streams: tuple[Position, ...]


class Closed(Message, tag="closed:1", frozen=True):
    streams: tuple[str, ...]


FromWorker = Hello | Tokens | Ended | LoadReport | Bye | Visit
FromGateway = Ack | Pause | Resume | Closed
read_from_worker: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
read_from_gateway: MessageDecoder[FromGateway] = MessageDecoder(FromGateway)
