"""Frames of the token channel: 4 bytes of length (big endian), then msgpack ``[version, type, ...]``.
Never pickle.

::

    worker -> gateway   HELLO   secret, worker id          first frame of every connection
                        TOKENS  [[stream, offset, ids, finish | nil, extra | nil], ...]
                        LOAD    a load report (serve_app.channel.load), to gateways that have subscribed
                        BYE
    gateway -> worker   ACK     [[stream, next offset, finished], ...]     cumulative, sent lazily
                        PAUSE   [stream, ...]              a reader is slow
                        RESUME  [[stream, offset], ...]    it has caught up: go on from there
                        CLOSED  [stream, ...]              nobody reads these: stop making tokens

``ids`` are little-endian int32 bytes; ``offset`` counts a stream's tokens from 0; ``extra`` is a list
with one entry per token (log-probabilities, for instance).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

VERSION = 1
MAX_FRAME = 4 * 1024 * 1024
# A peer that has not said who it is gets no more memory than this.
MAX_HELLO = 4096

HELLO, TOKENS, BYE, ACK, PAUSE, RESUME, CLOSED, LOAD = range(1, 9)


class BadFrame(ValueError):
    """Bytes that are no frame of this protocol; the connection they came over is closed."""


@dataclass(slots=True, frozen=True)
class InboxAddress:
    """Where a gateway listens, and the secret that lets a worker in. Travels inside requests."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def to_wire(self) -> dict[str, Any]:
        return {"host": self.host, "port": self.port, "secret": self.secret}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> InboxAddress:
        return cls(str(wire["host"]), int(wire["port"]), bytes(wire["secret"]))


@dataclass(slots=True, frozen=True)
class TokenItem:
    """Tokens of one stream from ``offset`` on: what a step made, or the end of the stream, or both."""

    stream_id: str
    offset: int
    ids: tuple[int, ...]
    finish: str | None = None
    extra: list[Any] | None = None

    @property
    def end(self) -> int:
        return self.offset + len(self.ids)

    def to_wire(self) -> list[Any]:
        return [self.stream_id, self.offset, pack_ids(self.ids), self.finish, self.extra]

    @classmethod
    def from_wire(cls, wire: Any) -> TokenItem:
        """Raises :class:`BadFrame` for anything but what :meth:`to_wire` makes."""
        if not isinstance(wire, list) or len(wire) != 5:
            raise BadFrame("an item has five fields")
        stream_id, offset, ids, finish, extra = wire
        if type(stream_id) is not str or type(offset) is not int or offset < 0 or type(ids) is not bytes:
            raise BadFrame("an item is [str, offset, bytes, finish, extra]")
        if len(ids) % 4 or not (finish is None or type(finish) is str):
            raise BadFrame("an item's ids are int32 and its finish is text")
        if extra is not None and (type(extra) is not list or len(extra) != len(ids) // 4):
            raise BadFrame("extra has one entry per token")
        return cls(stream_id, offset, unpack_ids(ids), finish, extra)


def pack_ids(ids: tuple[int, ...]) -> bytes:
    if len(ids) == 1:
        return ids[0].to_bytes(4, "little", signed=True)
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    if len(data) == 4:
        return (int.from_bytes(data, "little", signed=True),)
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def encode(kind: int, *fields: Any) -> bytes:
    """One frame as bytes; raises :class:`BadFrame` if it is larger than 4 MiB."""
    body = msgpack.packb([VERSION, kind, *fields], use_bin_type=True)
    if len(body) > MAX_FRAME:
        raise BadFrame(f"a frame of {len(body)} bytes is larger than {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


class FrameReader:
    """Cuts a byte stream into frames. ``limit`` is the largest body accepted, in bytes."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[int, list[Any]] | None:
        """(type, fields) of the next whole frame, or None; raises :class:`BadFrame`."""
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if size > self.limit:
            raise BadFrame(f"a frame of {size} bytes is larger than {self.limit}")
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        try:
            frame = msgpack.unpackb(body, raw=False, use_list=True, strict_map_key=True, max_ext_len=0)
        except Exception as error:
            # msgpack raises half a dozen kinds, not all of them ValueErrors.
            raise BadFrame(f"not msgpack: {error}") from error
        if not isinstance(frame, list) or len(frame) < 2 or type(frame[1]) is not int:
            raise BadFrame("a frame is [version, type, ...]")
        if frame[0] != VERSION:
            raise BadFrame(f"version {frame[0]!r} instead of {VERSION}")
        return frame[1], frame[2:]
