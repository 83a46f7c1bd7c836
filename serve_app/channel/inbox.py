"""The gateway's end of the token channel: one listener, many workers, many streams."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import cast

from serve_app.channel import frames
from serve_app.channel.frames import FrameReader
from serve_app.wire.address import InboxAddress
from serve_app.wire.load import LoadReport
from serve_app.wire.message import BadMessage, Message
from serve_app.wire.tokens import (
    Ack,
    Acked,
    Bye,
    Closed,
    Ended,
    FromWorker,
    Hello,
    Pause,
    Position,
    Resume,
    TokenItem,
    Tokens,
    read_from_worker,
)  # fmt: skip
from serve_app.wire.turns import Visit

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
ACK_INTERVAL_S = 0.1
# Tokens nobody has read yet: above this a stream's worker is asked to hold back.
PAUSE_TOKENS = 4096


class ChannelGap(Exception):
    """Tokens of a stream are missing: what comes next can't be shown."""


class Stream:
    """Tokens of one request in order, without gaps or repeats: ``async for item in stream``. Ends behind
    ``finish``.

    Items may come over any connection, or be fed from the unary call's result; ``offset`` decides what
    is new.
    """

    def __init__(self, inbox: TokenInbox, stream_id: str, start: int, replica: str = "") -> None:
        self.stream_id = stream_id
        self.replica = replica
        self.next_offset = start
        self.finished = False
        self._inbox = inbox
        self._items: deque[TokenItem] = deque()
        self._unread = 0
        self._paused = False
        self._dropping = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._source: _Connection | None = None

    def feed(self, item: TokenItem) -> None:
        """Adds an item; what is known already is dropped, and a gap ends the stream with
        :class:`ChannelGap`.
        """
        if self.finished or self._error is not None:
            return
        if item.offset > self.next_offset:
            missing = f"tokens {self.next_offset} to {item.offset - 1} of stream {self.stream_id} are missing"
            self.fail(ChannelGap(missing))
            return
        if item.end < self.next_offset or (item.end == self.next_offset and item.finish is None):
            return
        if item.offset < self.next_offset:
            known = self.next_offset - item.offset
            logprobs = None if item.logprobs is None else item.logprobs[known:]
            item = TokenItem(self.stream_id, self.next_offset, item.ids[known:], item.finish, logprobs)
        self.next_offset = item.end
        self.finished = item.finish is not None
        self._items.append(item)
        self._unread += len(item.ids)
        self._wake()

    def receive(self, connection: _Connection, item: TokenItem) -> None:
        """:meth:`feed` for what comes over the channel: never holds much more than the inbox's
        ``pause_tokens``.
        """
        if self._source is not connection:
            # A new connection has not been asked to hold back yet.
            self._source = connection
            self._paused = self._dropping = False
        if self._paused and self._unread > 2 * self._inbox.pause_tokens:
            self._dropping = True
        if self._dropping:
            # The worker keeps what is not acknowledged; after a resume it starts again at next_offset.
            if self._paused or item.offset > self.next_offset:
                return
            self._dropping = False
        self.feed(item)
        if self._unread > self._inbox.pause_tokens and not self._paused:
            self._paused = True
            connection.send(Pause((self.stream_id,)))

    @property
    def connected(self) -> bool:
        """Whether a worker has sent tokens of it over a connection that still stands."""
        return self._source is not None and self._source.alive

    def fail(self, error: Exception) -> None:
        """Ends the stream; the reader gets what came before, then ``error``."""
        if self._error is None and not self.finished:
            self._error = error
        self._wake()

    def __aiter__(self) -> AsyncIterator[TokenItem]:
        return self

    async def __anext__(self) -> TokenItem:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        self._unread -= len(item.ids)
        if self._paused and self._unread <= self._inbox.pause_tokens // 2:
            self._paused = False
            if self._source is not None:
                self._source.send(Resume((Position(self.stream_id, self.next_offset),)))
        return item

    def close(self) -> None:
        self._inbox.close_stream(self.stream_id)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenInbox:
    """Listens for workers. ``address`` goes into requests; workers that do not know its secret are hung
    up on.

    ``on_load(worker id, report)``: a subscribed worker tells of its load; None when its connection ends.
    ``on_ended(stream id, result)``: how a request has ended that came with others; see :class:`Ended`.
    ``on_visit(gateway)``: another gateway has connected; what is returned speaks with it from now on.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        pause_tokens: int = PAUSE_TOKENS,
        on_load: Callable[[str, LoadReport | None], None] | None = None,
        on_visit: Callable[[str], asyncio.Protocol] | None = None,
    ) -> None:
        self.pause_tokens = pause_tokens
        self.on_load = on_load
        self.on_ended: Callable[[str, bytes], None] | None = None
        self.on_visit = on_visit
        self._host = host
        self._port = port
        self._secret = secrets.token_bytes(32)
        self._streams: dict[str, Stream] = {}
        self._connections: set[_Connection] = set()
        self._visits: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> InboxAddress:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self.address

    @property
    def address(self) -> InboxAddress:
        if self._server is None:
            raise RuntimeError("the inbox is not started")
        return InboxAddress(self._host, self._port, self._secret)

    @property
    def workers(self) -> list[str]:
        """Ids of the workers connected now."""
        return sorted(c.worker_id for c in self._connections if c.worker_id is not None)

    def __len__(self) -> int:
        """Open streams."""
        return len(self._streams)

    def open_stream(self, stream_id: str, start: int = 0, replica: str = "") -> Stream:
        """Registers a stream, before its request is sent. ``start`` is the first offset expected, ``replica`` who is
        asked.
        """
        if stream_id in self._streams:
            raise ValueError(f"stream {stream_id} is open already")
        stream = self._streams[stream_id] = Stream(self, stream_id, start, replica)
        return stream

    def close_stream(self, stream_id: str) -> None:
        """Forgets a stream; if it wasn't finished, its worker is told that nobody reads it any more."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        if not stream.finished and (source := stream._source or self._connection_of(stream.replica)) is not None:
            source.send(Closed((stream_id,)))
        stream.fail(ConnectionAbortedError(f"stream {stream_id} is closed"))

    def _connection_of(self, replica: str) -> _Connection | None:
        return next((one for one in self._connections if replica and one.replica == replica), None)

    async def aclose(self) -> None:
        """Stops listening, hangs up and fails the streams that are still open."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        for transport in self._visits:
            transport.abort()
        for stream_id in list(self._streams):
            self.close_stream(stream_id)

    def authentic(self, secret: bytes) -> bool:
        return hmac.compare_digest(secret, self._secret)

    def disconnected(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        worker = connection.worker_id
        # A worker that reconnects may do so before the old connection's end is noticed.
        if worker is not None and self.on_load is not None and worker not in self.workers:
            self.on_load(worker, None)

    def visited(self, connection: _Connection, gateway: str, transport: asyncio.Transport, rest: bytes) -> None:
        """Another gateway's connection goes to who speaks with it."""
        if self.on_visit is None:
            raise BadMessage("no gateway is expected here")
        self._connections.discard(connection)
        self._visits = {t for t in self._visits if not t.is_closing()} | {transport}
        protocol = self.on_visit(gateway)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if rest:
            protocol.data_received(rest)

    def deliver(self, connection: _Connection, item: TokenItem) -> tuple[int, bool] | None:
        """(next offset, finished) to acknowledge; None if nobody reads the stream."""
        stream = self._streams.get(item.stream_id)
        if stream is None:
            return None
        stream.receive(connection, item)
        return stream.next_offset, stream.finished


class _Connection(asyncio.Protocol):
    def __init__(self, inbox: TokenInbox) -> None:
        self.worker_id: str | None = None
        # As its load reports say.
        self.replica = ""
        self._inbox = inbox
        self._reader = FrameReader(read_from_worker, limit=frames.MAX_HELLO)
        self._transport: asyncio.Transport | None = None
        self._acks: dict[str, tuple[int, bool]] = {}
        self._ack_timer: asyncio.TimerHandle | None = None
        self._hello_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No check of the class: uvloop's transports are none of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        frames.notice_lost_machine(transport)
        self._inbox._connections.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inbox.disconnected(self)
        self._transport = None
        for timer in (self._ack_timer, self._hello_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while self._transport is not None and (message := self._reader.next()) is not None:
                self._handle(message)
        except BadMessage as error:
            log.warning("closing the channel of worker %s: %s", self.worker_id, error)
            self.close()

    @property
    def alive(self) -> bool:
        return self._transport is not None

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def _handle(self, message: FromWorker) -> None:
        if self.worker_id is None:
            self._hello(message)
        elif isinstance(message, Tokens):
            self._tokens(message.items)
        elif isinstance(message, Ended):
            for stream_id, result in message.streams:
                if self._inbox.on_ended is not None:
                    self._inbox.on_ended(stream_id, result)
        elif isinstance(message, LoadReport):
            self.replica = message.replica
            if self._inbox.on_load is not None:
                self._inbox.on_load(self.worker_id, message)
        elif isinstance(message, Bye):
            self._flush_acks()
            if self._transport is not None:
                self._transport.close()
        else:
            raise BadMessage("a second hello")

    def _hello(self, message: FromWorker) -> None:
        if not isinstance(message, Hello | Visit):
            raise BadMessage("the first frame must be a hello")
        if not self._inbox.authentic(message.secret):
            raise BadMessage("wrong secret")
        if isinstance(message, Visit):
            self._visit(message)
            return
        self.worker_id = message.worker_id
        self._reader.limit = frames.MAX_FRAME
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _visit(self, message: Visit) -> None:
        assert self._transport is not None
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        transport, self._transport = self._transport, None
        self._inbox.visited(self, message.gateway, transport, self._reader.rest())

    def _tokens(self, items: Iterable[TokenItem]) -> None:
        closed = []
        urgent = False
        for item in items:
            if item.logprobs is not None and len(item.logprobs) != len(item.ids):
                raise BadMessage("an item has one log-probability per token")
            ack = self._inbox.deliver(self, item)
            if ack is None:
                closed.append(item.stream_id)
            else:
                self._acks[item.stream_id] = ack
                urgent = urgent or ack[1]
        if closed:
            self.send(Closed(tuple(closed)))
        if urgent:
            # A finished stream is freed at the worker as soon as it is acknowledged.
            self._flush_acks()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_INTERVAL_S, self._flush_acks)

    def _flush_acks(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._acks:
            acks, self._acks = self._acks, {}
            self.send(Ack(tuple(Acked(stream, offset, done) for stream, (offset, done) in acks.items())))
