"""The worker's end of the token channel: keeps what is not acknowledged, and sends it again after a
reconnect.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from msgspec.structs import replace

from serve_app.channel import frames
from serve_app.channel.endings import Endings
from serve_app.channel.frames import FrameReader
from serve_app.channel.outgoing import Outgoing
from serve_app.wire.address import InboxAddress
from serve_app.wire.load import LoadReport
from serve_app.wire.message import BadMessage
from serve_app.wire.tokens import (
    Ack,
    Acked,
    Bye,
    Closed,
    Ending,
    FromGateway,
    Hello,
    Pause,
    Position,
    Resume,
    TokenItem,
    Tokens,
    read_from_gateway,
)  # fmt: skip

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
# Items per frame after a long interruption; frames that are still too large are halved.
FRAME_ITEMS = 8192


class TokenSender:
    """All calls belong in one event loop (from the engine's thread:
    ``loop.call_soon_threadsafe(sender.send, ...)``).

    ``on_lost(address, stream ids)``: a connection broke; it is being re-established and nothing is lost,
    but the gateway may be gone. ``on_closed(stream id)``: nobody reads the stream, its request should be
    aborted.
    """

    def __init__(
        self,
        worker_id: str,
        *,
        on_lost: Callable[[InboxAddress, list[str]], None] | None = None,
        on_closed: Callable[[str], None] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._on_lost = on_lost
        self._on_closed = on_closed
        self._connections: dict[InboxAddress, _Connection] = {}
        self._streams: dict[str, Outgoing[_Connection]] = {}

    def __len__(self) -> int:
        """Streams with something left to send or to be acknowledged, or not finished."""
        return len(self._streams)

    def open(self, stream_id: str, address: InboxAddress, start: int = 0) -> None:
        """Registers a stream whose first token will have offset ``start``, and connects if that is still
        to do.
        """
        if stream_id in self._streams:
            raise ValueError(f"stream {stream_id} is open already")
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(self, address)
        stream = self._streams[stream_id] = Outgoing(stream_id, connection, start)
        connection.add(stream)

    def send(self, items: Iterable[TokenItem]) -> None:
        """Sends the tokens of one engine step: one frame per gateway, at once.

        Offsets must follow on from what the stream had before (ValueError otherwise). Items of streams
        that are not open, or closed by their reader, are dropped.
        """
        touched: dict[_Connection, list[Outgoing[_Connection]]] = {}
        for item in items:
            stream = self._streams.get(item.stream_id)
            if stream is None:
                continue
            if item.offset != stream.end or stream.finished:
                raise ValueError(f"stream {item.stream_id} is at {stream.end}, not at {item.offset}")
            stream.items.append(item)
            stream.end = item.end
            stream.finished = item.finish is not None
            touched.setdefault(stream.connection, []).append(stream)
        for connection, streams in touched.items():
            connection.flush(streams)

    def undelivered(self, stream_id: str) -> list[TokenItem]:
        """What the gateway has not acknowledged, in order: goes into the unary result, to be fed to the
        stream.

        The gateway drops what it has already, so a complete answer never depends on the channel.
        """
        stream = self._streams.get(stream_id)
        return list(stream.items) if stream else []

    def ended(self, address: InboxAddress, ending: Ending) -> None:
        """Tells a gateway how a request has ended, with others that end at the same time, and again where the
        connection breaks soon after. Lost where the gateway has never been connected to: the call that brought the
        request answers the same.
        """
        if (connection := self._connections.get(address)) is not None:
            connection.ended(ending)

    def close(self, stream_id: str) -> None:
        """Forgets a stream and what was not acknowledged (hand :meth:`undelivered` over first)."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.connection.remove(stream)

    def connected(self, address: InboxAddress) -> bool:
        """Whether there is a working connection to a gateway at this moment."""
        connection = self._connections.get(address)
        return connection is not None and connection.connected

    def subscribe(self, address: InboxAddress, lease_s: float) -> bool:
        """Keeps a connection to a gateway for ``lease_s`` seconds, with streams or without. True if it is new."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(self, address)
        return connection.lease(lease_s)

    @property
    def subscribers(self) -> int:
        """Gateways that want :meth:`report` at this moment."""
        return sum(connection.leased for connection in self._connections.values())

    def report(self, load: LoadReport) -> None:
        """Sends a load report to every subscriber. Only the latest counts: where it can't be sent now, it is sent when
        the connection is there again, unless a newer one has taken its place.
        """
        for connection in self._connections.values():
            if connection.leased:
                connection.report(load)

    async def aclose(self) -> None:
        for connection in list(self._connections.values()):
            await connection.aclose()
        self._streams.clear()

    # -- called by connections -------------------------------------------------------------------------------

    def acknowledged(self, acks: Sequence[Acked]) -> None:
        for stream_id, offset, finished in acks:
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            stream.acknowledge(offset, finished)
            if stream.finished and not stream.items:
                self.close(stream_id)

    def pause(self, stream_ids: Sequence[str]) -> None:
        for stream_id in stream_ids:
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.paused = True

    def resume(self, positions: Sequence[Position]) -> None:
        for stream_id, offset in positions:
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.resume(offset)
                stream.connection.flush([stream])

    def closed(self, stream_ids: Sequence[str]) -> None:
        for stream_id in stream_ids:
            if stream_id in self._streams:
                self.close(stream_id)
                if self._on_closed is not None:
                    self._on_closed(stream_id)

    def lost(self, address: InboxAddress, stream_ids: list[str]) -> None:
        if self._on_lost is not None:
            self._on_lost(address, stream_ids)

    def idle(self, connection: _Connection) -> None:
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]


class _Connection(asyncio.Protocol):
    """One inbox. Reconnects while it has streams or a lease; an idle one stays until the gateway hangs up."""

    def __init__(self, sender: TokenSender, address: InboxAddress) -> None:
        self.address = address
        self._sender = sender
        self._streams: dict[str, Outgoing[_Connection]] = {}
        self._transport: asyncio.Transport | None = None
        self._writable = False
        self._reader = FrameReader(read_from_gateway)
        self._task: asyncio.Task[None] | None = None
        self._backoff = FIRST_BACKOFF_S
        self._closing = False
        self._leased_until = 0.0
        self._load: LoadReport | None = None
        self._endings = Endings()

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def leased(self) -> bool:
        """Whether the gateway wants load reports."""
        return self._leased_until > time.monotonic()

    @property
    def wanted(self) -> bool:
        return bool(self._streams) or self.leased

    def add(self, stream: Outgoing[_Connection]) -> None:
        self._streams[stream.stream_id] = stream
        self._want()

    def lease(self, seconds: float) -> bool:
        new = not self.leased
        self._leased_until = time.monotonic() + seconds
        self._want()
        return new

    def _want(self) -> None:
        if self._transport is None and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._connect())

    def report(self, load: LoadReport) -> None:
        self._load = load
        if self._transport is not None and self._writable:
            self._transport.write(frames.encode(load))
            self._load = None

    def ended(self, ending: Ending) -> None:
        if self._endings.add(ending):
            asyncio.get_running_loop().call_soon(self._tell_endings)

    def _tell_endings(self) -> None:
        for frame in self._endings.new():
            # Behind a full buffer they come late; without a connection, over the next one.
            if self._transport is not None:
                self._transport.write(frame)

    def remove(self, stream: Outgoing[_Connection]) -> None:
        self._streams.pop(stream.stream_id, None)

    def flush(self, streams: Iterable[Outgoing[_Connection]]) -> None:
        """Writes everything not sent yet of ``streams``, in as few frames as the size limit allows."""
        if self._transport is None or not self._writable:
            return
        batch: list[TokenItem] = []
        for stream in streams:
            if stream.paused or stream.sent == len(stream.items):
                continue
            batch.extend(stream.items[stream.sent :])
            stream.sent = len(stream.items)
        for at in range(0, len(batch), FRAME_ITEMS):
            self._write(batch[at : at + FRAME_ITEMS])

    async def aclose(self) -> None:
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._transport is not None:
            self._transport.write(frames.encode(Bye()))
            self._transport.close()
        self._sender.idle(self)

    def _write(self, batch: list[TokenItem]) -> None:
        assert self._transport is not None
        try:
            frame = frames.encode(Tokens(tuple(batch)))
        except BadMessage:
            if len(batch) == 1:
                log.error("stream %s: log-probabilities larger than a frame are left out", batch[0].stream_id)
                self._transport.write(frames.encode(Tokens((replace(batch[0], logprobs=None),))))
                return
            half = len(batch) // 2
            self._write(batch[:half])
            self._write(batch[half:])
            return
        self._transport.write(frame)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self.wanted and not self._closing:
                try:
                    connect = loop.create_connection(lambda: self, self.address.host, self.address.port)
                    await asyncio.wait_for(connect, CONNECT_TIMEOUT_S)
                    return
                except OSError as error:
                    log.info("no connection to %s:%d: %s", self.address.host, self.address.port, error)
                await self._pause_before_retry()
            self._sender.idle(self)
        finally:
            # A connection refused at once may already have started the next attempt.
            if self._task is asyncio.current_task():
                self._task = None

    async def _reconnect(self) -> None:
        await self._pause_before_retry()
        await self._connect()

    async def _pause_before_retry(self) -> None:
        # Jitter, so that the workers of a restarted gateway do not all knock at once.
        await asyncio.sleep(self._backoff * random.uniform(0.5, 1.0))
        self._backoff = min(self._backoff * 2, MAX_BACKOFF_S)

    # -- asyncio.Protocol (TCP_NODELAY is asyncio's default) -------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No check of the class: uvloop's transports are none of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        frames.notice_lost_machine(transport)
        self._writable = True
        self._reader = FrameReader(read_from_gateway)
        transport.set_write_buffer_limits(high=frames.MAX_FRAME)
        transport.write(frames.encode(Hello(self.address.secret, self._sender.worker_id)))
        for stream in self._streams.values():
            stream.sent = 0
            stream.paused = False
        if self._load is not None:
            self.report(self._load)
        self.flush(list(self._streams.values()))
        transport.writelines(self._endings.again())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable = False
        if self._closing:
            return
        if not self.wanted:
            self._sender.idle(self)
            return
        self._task = asyncio.get_running_loop().create_task(self._reconnect())
        if self._streams:
            self._sender.lost(self.address, list(self._streams))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (message := self._reader.next()) is not None:
                self._handle(message)
        except BadMessage as error:
            log.warning("closing the channel to %s:%d: %s", self.address.host, self.address.port, error)
            if self._transport is not None:
                self._transport.abort()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._load is not None:
            self.report(self._load)
        self.flush(list(self._streams.values()))

    def _handle(self, message: FromGateway) -> None:
        # The other side accepted our secret: a later loss starts with short pauses again.
        self._backoff = FIRST_BACKOFF_S
        if isinstance(message, Ack):
            self._sender.acknowledged(message.streams)
        elif isinstance(message, Pause):
            self._sender.pause(message.streams)
        elif isinstance(message, Resume):
            self._sender.resume(message.streams)
        elif isinstance(message, Closed):
            self._sender.closed(message.streams)
