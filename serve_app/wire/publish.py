"""Worker -> pool of its node: chunks that the pool may fetch from it."""

from __future__ import annotations

import msgspec

from serve_app.wire.message import Message, MessageDecoder
from serve_app.wire.parts import Part


class ChunkFields(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The fields of a :class:`serve_app.kv.chunk.ChunkMeta`, not checked against each other."""

    chunk_id: str
    root: bytes
    start_token: int
    n_tokens: int
    block_keys: tuple[bytes, ...]
    tail_key: bytes | None
    layout: str
    nbytes: int
    tenant: bytes


class PublishCall(Message, tag="publish:1", frozen=True):
    """Answered by the ids of the chunks that the pool holds afterwards. ``parts``: what each of several exporters has
    of every one of them; one has all.
    """

    chunks: tuple[ChunkFields, ...]
    parts: tuple[Part, ...] = ()


read_publish_call: MessageDecoder[PublishCall] = MessageDecoder(PublishCall)
