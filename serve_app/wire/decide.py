"""Calls that have questions about one text answered: gateway -> decode replica -> its worker."""

from __future__ import annotations

from typing import Literal

import msgspec

from serve_app.wire.generate import AdapterAt, Failed, Share, Weight
from serve_app.wire.message import Message, MessageDecoder


class Branch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What comes behind the shared tokens, ``ids``, and the tokens ``asked`` about; both little-endian int32."""

    ids: bytes
    asked: bytes


class DecideCall(Message, tag="decide:1", frozen=True):
    """How likely the next token is each of some, behind ``shared`` tokens (little-endian int32) and each of
    ``branches``. Answered by :data:`DecideResult`. The other fields are as in
    :class:`~serve_app.wire.generate.GenerateCall`.
    """

    id: str
    shared: bytes
    branches: tuple[Branch, ...]
    salt: bytes
    priority: Literal["realtime", "batch"] = "realtime"
    share: Share = 0.05
    adapter: AdapterAt | None = None
    weight: Weight = 1.0
    origin: tuple[str, str] = ("", "")


class Decided(Message, tag="decided:1", frozen=True):
    """``logprobs``: of each branch those of the tokens asked about (natural log, little-endian float32), in order.
    ``cached``: of the shared tokens, those that were found stored.
    """

    logprobs: tuple[bytes, ...]
    cached: int = 0
    replica: str = ""


DecideResult = Decided | Failed
read_decide_call: MessageDecoder[DecideCall] = MessageDecoder(DecideCall)
read_decide_result: MessageDecoder[DecideResult] = MessageDecoder(DecideResult)
