"""The line between rank 0 and each other rank: words, in order, and whoever ends is noticed at once.

The kernel closes a process's sockets however it dies, so that neither side waits for one that is gone::

    rank 0 --- RankMeeting, RankAllocate, RankStep, RankCopyOut, RankCopyIn ---> rank n
    rank 0 <-- RankHello, RankLoaded, RankFailed, RankState -------------------- rank n
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.wire.message import BadMessage, Message
from serve_app.wire.ranks import (
    FromRank,
    RankFailed,
    RankHello,
    RankLoaded,
    RankState,
    ToRank,
    read_from_rank,
    read_to_rank,
)

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
# A process that has to be started, and to import torch first.
COMES_S = 180.0
STATE_PERIOD_S = 5.0
# What a rank says when it fails comes before the end of its line is acted upon.
LAST_WORD_S = 1.0
MOST_BYTES = 1 << 30
# Of who has not shown the token yet, and how long it may take to.
HELLO_BYTES, HELLO_S = 4096, 10.0
# Others of the machine may connect, too.
BACKLOG = 128


class RankLost(RuntimeError):
    """A rank has ended, or could not load its part; the text names it and says why."""


@dataclass(slots=True, frozen=True)
class LinkAddress:
    """Where rank 0 awaits the others, and what they show that they are meant."""

    host: str
    port: int
    token: str


def send(line: socket.socket, message: Message) -> None:
    data = message.encode()
    line.sendall(_LENGTH.pack(len(data)) + data)


def receive(line: socket.socket, most: int = MOST_BYTES) -> memoryview | None:
    """None: the other side has gone."""
    head = _exactly(line, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise BadMessage(f"a message of {length} bytes; the other side is no rank")
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> memoryview | None:
    view, done = memoryview(bytearray(count)), 0
    while done < count:
        try:
            got = line.recv_into(view[done:])
        except OSError:
            return None
        if not got:
            return None
        done += got
    return view


@dataclass(slots=True)
class _Peer:
    line: socket.socket
    pid: int
    loaded: RankLoaded | None = None
    state: RankState | None = None
    failed: str = ""


class Leader:
    """Rank 0's side. ``on_lost`` is called once, in a thread of its own, when a rank has ended after all had come."""

    def __init__(self, ranks: int, *, host: str = "127.0.0.1", on_lost: Callable[[str], None]) -> None:
        self.ranks = ranks
        self._on_lost = on_lost
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self.address = LinkAddress(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._closed = False

    def await_all(self, meeting: Message, wait_s: float = COMES_S) -> None:
        """Returns once every rank has come and been told where the ``meeting`` is. Raises :class:`RankLost`."""
        until = time.monotonic() + wait_s
        while len(self._peers) < self.ranks - 1:
            self._listener.settimeout(max(0.1, until - time.monotonic()))
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, self.ranks)) - set(self._peers))
                raise RankLost(f"rank {missing[0]} of {self.ranks} has not come within {wait_s:g} s") from None
            line.settimeout(HELLO_S)
            said = self._hello(line)
            if said is None:
                line.close()
                continue
            line.settimeout(None)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[said.rank] = _Peer(line, said.pid)
        self._listener.close()
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()
        self.tell(meeting)

    def tell(self, message: Message) -> None:
        """Sends a message to all ranks."""
        data = message.encode()
        framed = _LENGTH.pack(len(data)) + data
        for rank, peer in self._peers.items():
            try:
                peer.line.sendall(framed)
            except OSError as error:
                raise RankLost(self._why(rank)) from error

    def await_loaded(self) -> list[RankLoaded]:
        """What the other ranks have loaded, in their order. Raises :class:`RankLost`."""
        with self._changed:
            while True:
                for rank, peer in self._peers.items():
                    if peer.failed:
                        raise RankLost(self._why(rank))
                told = [self._peers[rank].loaded for rank in sorted(self._peers)]
                if None not in told:
                    return [each for each in told if each is not None]
                self._changed.wait(1.0)

    def reason(self) -> str:
        """What a rank has said why it failed, or "": where a collective fails, that is why."""
        until = time.monotonic() + LAST_WORD_S
        with self._changed:
            while time.monotonic() < until:
                for rank, peer in self._peers.items():
                    if peer.failed:
                        return self._why(rank)
                self._changed.wait(0.1)
        return ""

    def states(self) -> list[dict[str, Any]]:
        """What each of the other ranks last told of itself."""
        found = []
        for rank, peer in sorted(self._peers.items()):
            own: dict[str, Any] = {"rank": rank, "pid": peer.pid}
            if peer.loaded is not None:
                own |= {"read_bytes": peer.loaded.read_bytes, "load_s": round(peer.loaded.seconds, 2)}
            if peer.state is not None:
                own |= {"memory_bytes": peer.state.memory_bytes, "together_s": round(peer.state.together_s, 3)}
            found.append(own)
        return found

    def close(self) -> None:
        """Ends the other ranks."""
        self._closed = True
        self._listener.close()
        for peer in self._peers.values():
            # Closing alone says nothing while a thread still looks at the line.
            with contextlib.suppress(OSError):
                peer.line.shutdown(socket.SHUT_RDWR)
            peer.line.close()

    def _hello(self, line: socket.socket) -> RankHello | None:
        try:
            data = receive(line, HELLO_BYTES)
            said = read_from_rank(data) if data is not None else None
        except BadMessage:
            return None
        right = isinstance(said, RankHello) and secrets.compare_digest(said.token, self.address.token)
        return said if right and isinstance(said, RankHello) and 0 < said.rank < self.ranks else None

    def _listen(self) -> None:
        poll = select.poll()
        by_file = {peer.line.fileno(): (rank, peer) for rank, peer in self._peers.items()}
        for file in by_file:
            poll.register(file, select.POLLIN)
        while not self._closed:
            for file, _ in poll.poll(500):
                rank, peer = by_file[file]
                data = receive(peer.line)
                with self._changed:
                    if data is not None:
                        self._heard(peer, read_from_rank(data))
                    else:
                        peer.failed = peer.failed or "its process has ended"
                    self._changed.notify_all()
                if data is None:
                    if not self._closed:
                        self._on_lost(self._why(rank))
                    return

    @staticmethod
    def _heard(peer: _Peer, said: FromRank) -> None:
        if isinstance(said, RankLoaded):
            peer.loaded = said
        elif isinstance(said, RankState):
            peer.state = said
        elif isinstance(said, RankFailed):
            peer.failed = said.reason

    def _why(self, rank: int) -> str:
        peer = self._peers[rank]
        return f"rank {rank} of {self.ranks} (process {peer.pid}) is lost: {peer.failed or 'its process has ended'}"


@dataclass(slots=True)
class Follower:
    """Another rank's side. The process ends with rank 0's, whatever it is doing."""

    rank: int
    line: socket.socket
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def connect(cls, rank: int, address: LinkAddress, end: Callable[[], None]) -> Follower:
        """``end`` is called in a thread of its own when rank 0 has gone."""
        line = socket.create_connection((address.host, address.port), timeout=30.0)
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = cls(rank, line)
        found.say(RankHello(rank, address.token, os.getpid()))
        threading.Thread(target=_watch, args=(line, end), name="rank-0", daemon=True).start()
        return found

    def say(self, message: Message) -> None:
        with self._sending:
            send(self.line, message)

    def next(self) -> ToRank | None:
        """None: rank 0 has gone."""
        data = receive(self.line)
        return None if data is None else read_to_rank(data)


def _watch(line: socket.socket, end: Callable[[], None]) -> None:
    """Waits until the other side has closed the line, without reading from it."""
    poll = select.poll()
    poll.register(line.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poll.poll()
    end()
