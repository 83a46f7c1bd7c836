"""Calls that have texts encoded: gateway -> encoder replica -> its worker."""

from __future__ import annotations

from typing import Literal

from serve_app.wire.generate import Failed
from serve_app.wire.message import Message, MessageDecoder


class EncodeCall(Message, tag="encode:3", frozen=True):
    """Sequences of token ids, one after the other: ``ids``, ``lengths`` and ``types`` are little-endian int32.
    Answered by :data:`EncodeResult`. What is None is as the model has it; ``heads``: what to say of each token.
    ``raw``: a reranker's logits, which it maps to (0, 1) otherwise.
    """

    ids: bytes = b""
    lengths: bytes = b""
    types: bytes | None = None
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    heads: tuple[Literal["sparse", "colbert"], ...] = ()
    raw: bool = False
    priority: Literal["realtime", "batch"] = "realtime"


class Encoded(Message, tag="encoded:1", frozen=True):
    """Rows of one length: little-endian float32 of ``shape``."""

    shape: tuple[int, ...]
    data: memoryview


class EncodedTokens(Message, tag="encoded-tokens:1", frozen=True):
    """With heads: float32 rows of their own ``sizes`` (int32), each a vector of ``width``, then what the heads say."""

    sizes: bytes
    width: int
    data: memoryview


EncodeResult = Encoded | EncodedTokens | Failed
read_encode_call: MessageDecoder[EncodeCall] = MessageDecoder(EncodeCall)
read_encode_result: MessageDecoder[EncodeResult] = MessageDecoder(EncodeResult)
