"""A connection of messages: frames in, frames out, and when it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from serve_app.channel import frames
from serve_app.channel.frames import FrameReader
from serve_app.wire.message import BadMessage, Message, MessageDecoder

log = logging.getLogger(__name__)


class Line(asyncio.Protocol):
    """``on_message`` gets what comes; ``on_lost`` is called once, however the connection ends."""

    def __init__(
        self, read: MessageDecoder[Any], on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> None:
        self._reader: FrameReader[Any] = FrameReader(read)
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None

    @property
    def alive(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No check of the class: uvloop's transports are none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        frames.notice_lost_machine(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while self._transport is not None and (message := self._reader.next()) is not None:
                self._on_message(message)
        except BadMessage as error:
            log.warning("closing a connection between gateways: %s", error)
            self.close()

    def send(self, message: Message) -> None:
        """What is sent when nobody is there any more is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def close(self) -> None:
        transport = self._transport
        self._end()
        if transport is not None:
            transport.abort()

    def _end(self) -> None:
        if self._transport is not None:
            self._transport = None
            self._on_lost()
