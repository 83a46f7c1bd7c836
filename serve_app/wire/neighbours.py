"""What two clusters say to each other, over HTTP: how busy the one is, and a request that is passed to it.

An answer to :class:`PassCall` is a stream of frames, each a message behind its length (four bytes, the highest first).
A length of 0 is a sign of life.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from serve_app.sampling_params import SamplingParams, TokenLogprobs
from serve_app.wire.message import BadMessage, Message, MessageDecoder
from serve_app.wire.tokens import Offset, TokenId

MEDIA_TYPE = "application/octet-stream"
# Of one frame: a step's tokens with twenty alternatives each are some kilobytes.
MAX_FRAME = 1 << 20
ALIVE = bytes(4)


class ModelOffer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One model of a cluster, which it can serve now. ``wait``, ``base``, ``token``: seconds, as in
    :class:`serve_app.routing.neighbours.Line`; ``workers`` share the work. ``tokenizer``: a fingerprint of its files.
    ``weights``, ``chunk_tokens``: what keys of cached prefixes start from, and what each stands for. ``cached``: the
    first four bytes of such keys, one behind the other: of what the asking cluster has passed, and nobody else.
    """

    wait: float
    base: float
    token: float
    workers: int
    tokenizer: str
    weights: bytes
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    cached: bytes = b""


class Offers(Message, tag="offers:2", frozen=True):
    """What one ``gateway`` tells another cluster, which it knows as ``account``. ``models``: what it can serve now.
    ``askers``: gateways of that cluster that have asked lately, each of which may pass requests.
    """

    gateway: str
    account: str
    askers: Annotated[int, Meta(ge=1, le=1024)]
    models: dict[str, ModelOffer]


class PassCall(Message, tag="pass:1", frozen=True):
    """One request, tokenised. ``ids``: little-endian int32. ``tenant``: 32 bytes that only the sender can make, the
    same for requests that may share cached prefixes. ``deadline_s``: seconds that are left for the first token.
    ``together``, ``origin``: as in :class:`serve_app.wire.generate.GenerateCall`.
    """

    model: Annotated[str, Meta(max_length=256)]
    ids: bytes
    sampling: SamplingParams
    tenant: Annotated[bytes, Meta(min_length=32, max_length=32)]
    tokenizer: str
    session: Annotated[str, Meta(max_length=64)] = ""
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    reject_if_busy: bool = False
    together: Annotated[int, Meta(ge=1, le=1024)] = 1
    origin: tuple[str, str] = ("", "")


class PassedTokens(Message, tag="passed-tokens:1", frozen=True):
    """Tokens behind those before; fields as in :class:`serve_app.wire.tokens.TokenItem`."""

    ids: tuple[TokenId, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached: Offset | None = None


class PassFailed(Message, tag="pass-failed:1", frozen=True):
    """Nothing more comes; the request may go on elsewhere."""

    error: str


read_offers: MessageDecoder[Offers] = MessageDecoder(Offers)
read_pass: MessageDecoder[PassCall] = MessageDecoder(PassCall)
read_passed: MessageDecoder[PassedTokens | PassFailed] = MessageDecoder(PassedTokens | PassFailed)


def frame(message: Message) -> bytes:
    data = message.encode()
    return len(data).to_bytes(4, "big") + data


class Frames:
    """Cuts a stream of bytes into messages. ``feed`` raises :class:`~serve_app.wire.message.BadMessage`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[PassedTokens | PassFailed]:
        found, rest, at = [], self._rest + data, 0
        while len(rest) - at >= 4:
            length = int.from_bytes(rest[at : at + 4], "big")
            if length > MAX_FRAME:
                raise BadMessage(f"a frame of {length} bytes")
            if len(rest) - at - 4 < length:
                break
            if length:
                found.append(read_passed(rest[at + 4 : at + 4 + length]))
            at += 4 + length
        self._rest = rest[at:]
        return found
