"""Frames of the token channel: 4 bytes of length (big endian), then one message of :mod:`serve_app.wire.tokens`.
Never pickle.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Generic, TypeVar

from serve_app.wire.message import BadMessage, Message, MessageDecoder

MAX_FRAME = 4 * 1024 * 1024
# A peer that has not said who it is gets no more memory than this.
MAX_HELLO = 4096
# After so many seconds without a word the kernel asks the other side's kernel, every second, and gives up after GONE_S
# in all. A kernel answers for a process that is busy or stopped, and not for a machine that is gone.
QUIET_S = 3
GONE_S = 8

T = TypeVar("T")


def encode(message: Message) -> bytes:
    """One frame as bytes; raises :class:`BadMessage` if it is larger than 4 MiB."""
    body = message.encode()
    if len(body) > MAX_FRAME:
        raise BadMessage(f"a frame of {len(body)} bytes is larger than {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


def notice_lost_machine(transport: asyncio.BaseTransport) -> None:
    """Ends the connection soon after the machine at its other end is gone or cannot be reached."""
    connected = transport.get_extra_info("socket")
    if connected is None or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_S - QUIET_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)


class FrameReader(Generic[T]):
    """Cuts a byte stream into messages. ``limit`` is the largest accepted, in bytes."""

    def __init__(self, read: MessageDecoder[T], limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._read = read
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def rest(self) -> bytes:
        """What has come and is no whole message yet, for another reader."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def next(self) -> T | None:
        """The next whole message, or None; raises :class:`BadMessage`."""
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if size > self.limit:
            raise BadMessage(f"a frame of {size} bytes is larger than {self.limit}")
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return self._read(body)
