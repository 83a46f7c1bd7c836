"""The line between rank 0 and each other rank: words, in order, and whoever ends is noticed at once.

The kernel closes a process's sockets however it dies, so that neither side waits for one that is gone; who is there and
does nothing any more is found by :mod:`.life`::

    rank 0 --- RankMeeting, RankGo, RankAllocate, RankStep, RankExport, RankCopyIn ----> rank n
    rank 0 <-- RankHello, RankReady, RankLoaded, RankFailed, RankState ------------------ rank n
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.activity import read_activity
from serve_app.parallel.door import admitted
from serve_app.parallel.frames import Heard, framed, prepare_line, receive, send
from serve_app.parallel.life import BEAT_S, TOGETHER_S, RankWatch, Waiting, Work, memory_bytes
from serve_app.wire.message import BadMessage, Message
from serve_app.wire.ranks import (
    RankFailed,
    RankGo,
    RankHello,
    RankLoaded,
    RankReady,
    RankState,
    ToRank,
    read_from_rank,
    read_to_rank,
)

log = logging.getLogger(__name__)

# A process that has to be started, and to import torch first.
COMES_S = 180.0
# What a rank says when it fails comes before the end of its line is acted upon.
LAST_WORD_S = 1.0
LOOPBACK = "127.0.0.1"
# A rank that said longer ago that it waits may have begun to compute.
FRESH = 3
_ENDED = "its process has ended"


class RankLost(RuntimeError):
    """A rank has ended, or could not load its part; the text names it and says why."""


@dataclass(slots=True, frozen=True)
class LinkAddress:
    """Where rank 0 awaits the others, and what they show that they are meant."""

    host: str
    port: int
    token: str


@dataclass(slots=True)
class _Peer:
    line: socket.socket
    pid: int
    heard: Heard
    # Of its process, where that is on this machine.
    process: int | None
    watch: RankWatch = field(default_factory=RankWatch)
    messages: int = 0
    loaded: RankLoaded | None = None
    ready: RankReady | None = None
    state: RankState | None = None
    state_at: float = 0.0
    failed: str = ""

    @property
    def waits_s(self) -> float:
        """For how long it has been waiting, if it has just said so."""
        new = time.monotonic() - self.state_at < FRESH * BEAT_S
        return self.state.waits_s if self.state is not None and new else 0.0

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.process, signal.SIGKILL)


class Leader:
    """Rank 0's side. ``on_lost`` is called once, in a thread of its own, when a rank has ended after all had come."""

    def __init__(self, ranks: int, *, host: str = LOOPBACK, on_lost: Callable[[str], None]) -> None:
        self.ranks = ranks
        # Rank 0's, for words of others; and for how long it waits for anything.
        self.waiting = Waiting()
        self.waits_s: Callable[[], float] = lambda: self.waiting.seconds
        self._on_lost = on_lost
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = LinkAddress(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._first = ""  # why the first was lost
        self._told = False
        self._closed = False

    def await_all(self, meeting: Message, wait_s: float = COMES_S) -> None:
        """Returns once every rank has come and been told where the ``meeting`` is. Raises :class:`RankLost`."""
        coming = admitted(self._listener, self.address.token, self.ranks, time.monotonic() + wait_s)
        with contextlib.closing(coming):
            while len(self._peers) < self.ranks - 1:
                said, line = next(coming, (None, None))
                if said is None or line is None:
                    missing = sorted(set(range(1, self.ranks)) - set(self._peers))
                    raise RankLost(f"rank {missing[0]} of {self.ranks} has not come within {wait_s:g} s")
                prepare_line(line)
                here = self.address.host == LOOPBACK
                self._peers[said.rank] = _Peer(line, said.pid, Heard(line), _process(said.pid) if here else None)
        self._listener.close()
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()
        threading.Thread(target=self._look_after, name="rank-watch", daemon=True).start()
        self.tell(meeting)

    def tell(self, message: Message) -> None:
        """Sends a message to all ranks. Raises :class:`RankLost`."""
        data = framed(message)
        for rank in self._peers:
            self._send(rank, data)

    def tell_one(self, rank: int, message: Message) -> None:
        """Sends a message to one of them. Raises :class:`RankLost`."""
        self._send(rank, framed(message))

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._peers[rank].line.sendall(data)
        except OSError as error:
            raise RankLost(self._why(rank)) from error

    def agree(self, ok: bool) -> bool:
        """Whether all ranks say yes, which each of them learns; every one has to ask at the same place. Others may
        take as long as they live. Raises :class:`RankLost`.
        """
        self._await(lambda peer: peer.ready is not None)
        for peer in self._peers.values():
            ok = ok and peer.ready is not None and peer.ready.ok
            peer.ready = None
        self.tell(RankGo(ok))
        return ok

    def await_loaded(self) -> list[RankLoaded]:
        """What the other ranks have loaded, in their order. Raises :class:`RankLost`."""
        self._await(lambda peer: peer.loaded is not None)
        told = [self._peers[rank].loaded for rank in sorted(self._peers)]
        return [each for each in told if each is not None]

    def reason(self) -> str:
        """Why the first rank was lost, or "": where a collective fails, that is why."""
        with self._changed:
            self._changed.wait_for(lambda: self._first, LAST_WORD_S)
            return self._first

    def states(self) -> list[dict[str, Any]]:
        """What each of the other ranks last told of itself."""
        found = []
        for rank, peer in sorted(self._peers.items()):
            own: dict[str, Any] = {"rank": rank, "pid": peer.pid}
            if peer.loaded is not None:
                loaded = peer.loaded
                own |= {"read_bytes": loaded.read_bytes, "held_bytes": loaded.held_bytes}
                own["load_s"] = round(loaded.seconds, 2)
            if peer.state is not None:
                own |= {"memory_bytes": peer.state.memory_bytes, "together_s": round(peer.state.together_s, 3)}
                own |= {"steps": peer.state.steps, "busy_s": round(peer.state.busy_s, 3)}
                own |= {"kv_given_bytes": peer.state.given_bytes, "kv_taken_bytes": peer.state.taken_bytes}
                own |= {"kv_waiting_bytes": peer.state.waiting_bytes, "kv_held_chunks": peer.state.held_chunks}
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
            if peer.process is not None:
                os.close(peer.process)
                peer.process = None

    def kill(self) -> None:
        """Ends the other ranks of this machine whatever they do, even one that is stopped; the others end when this
        process does.
        """
        self._closed = True  # their ends are no losses
        for peer in self._peers.values():
            peer.kill()

    def _await(self, true: Callable[[_Peer], bool]) -> None:
        with self.waiting.counted(), self._changed:
            while True:
                if self._first:
                    raise RankLost(self._first)
                if all(true(peer) for peer in self._peers.values()):
                    return
                self._changed.wait(1.0)

    def _listen(self) -> None:
        poll = select.poll()
        by_file = {peer.line.fileno(): (rank, peer) for rank, peer in self._peers.items()}
        for file in by_file:
            poll.register(file, select.POLLIN)
        while not self._closed and by_file:
            for file, _ in poll.poll(500):
                rank, peer = by_file[file]
                said, why = None, _ENDED
                try:
                    if (said := peer.heard.take()) is not None:
                        with self._changed:
                            for each in said:
                                self._hear(rank, peer, each)
                            self._changed.notify_all()
                except BadMessage as error:
                    said, why = None, f"what it says can't be read: {error}"
                if said is None:
                    poll.unregister(file)
                    del by_file[file]
                    self._lose(rank, why)

    def _hear(self, rank: int, peer: _Peer, data: bytes) -> None:
        said = read_from_rank(data)
        peer.messages += 1
        if isinstance(said, RankLoaded):
            peer.loaded = said
        elif isinstance(said, RankReady):
            peer.ready = said
        elif isinstance(said, RankState):
            peer.state, peer.state_at = said, time.monotonic()
        elif isinstance(said, RankFailed):
            peer.failed = said.reason
            self._first = self._first or self._why(rank)

    def _look_after(self) -> None:
        """Finds ranks that live and do nothing any more."""
        while not self._closed:
            time.sleep(BEAT_S)
            for rank, peer in self._peers.items():
                reason = peer.watch.look(peer.messages, lambda peer=peer: self._activity(peer))  # type: ignore[misc]
                if reason and not self._first:
                    self._lose(rank, reason)
                    peer.kill()  # what waits for it in a collective notices
                    return
            waits = [self.waits_s(), *(peer.waits_s for peer in self._peers.values())]
            if min(waits) >= TOGETHER_S and not self._first:
                self._lose(0, f"all of them have waited for one another for {TOGETHER_S:g} s")
                return

    def _activity(self, peer: _Peer) -> Any:
        return read_activity(peer.pid) if peer.process is not None else None

    def _lose(self, rank: int, why: str) -> None:
        if self._closed:
            return
        with self._changed:
            if rank:
                self._peers[rank].failed = self._peers[rank].failed or why
            self._first = self._first or (self._why(rank) if rank else f"the {self.ranks} ranks are stuck: {why}")
            told, self._told = self._told, True
            self._changed.notify_all()
        if not told:
            threading.Thread(target=self._on_lost, args=(self._first,), name="rank-lost", daemon=True).start()

    def _why(self, rank: int) -> str:
        peer = self._peers[rank]
        return f"rank {rank} of {self.ranks} (process {peer.pid}) is lost: {peer.failed or _ENDED}"


def _process(pid: int) -> int | None:
    """A handle of a process, that stays its own whoever has its number later."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


@dataclass(slots=True)
class Follower:
    """Another rank's side. The process ends with rank 0's, whatever it is doing."""

    rank: int
    line: socket.socket
    # For words of rank 0, and in collectives.
    waiting: Waiting = field(default_factory=Waiting)
    together: Waiting = field(default_factory=Waiting)
    work: Work = field(default_factory=Work)
    # What :meth:`serve_app.parallel.shelf.Shelf.look` tells.
    moved: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0)
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def connect(cls, rank: int, address: LinkAddress, end: Callable[[], None]) -> Follower:
        """``end`` is called in a thread of its own when rank 0 has gone."""
        line = socket.create_connection((address.host, address.port), timeout=30.0)
        line.settimeout(None)
        prepare_line(line)
        found = cls(rank, line)
        found.say(RankHello(rank, address.token, os.getpid()))
        threading.Thread(target=_watch, args=(line, end), name="rank-0", daemon=True).start()
        threading.Thread(target=found._beat, name="beat", daemon=True).start()
        return found

    def say(self, message: Message) -> None:
        with self._sending:
            send(self.line, message)

    def next(self) -> ToRank | None:
        """None: rank 0 has gone."""
        with self.waiting.counted():
            data = receive(self.line)
        return None if data is None else read_to_rank(data)

    def agree(self, ok: bool) -> bool:
        """As :meth:`Leader.agree`."""
        self.say(RankReady(self.rank, ok))
        said = self.next()
        if not isinstance(said, RankGo):
            raise RankLost("rank 0 has gone" if said is None else f"rank 0 says {type(said).__name__}, and not RankGo")
        return said.ok

    def _beat(self) -> None:
        began = time.monotonic()
        while True:
            lives, pid = time.monotonic() - began, os.getpid()
            waits_s = max(self.waiting.seconds, self.together.seconds)
            try:
                held, together_s, work, moved = memory_bytes(pid), self.together.total_s, self.work, self.moved()
                self.say(RankState(self.rank, pid, held, lives, together_s, waits_s, work.steps, work.busy_s, *moved))
            except OSError:
                return
            time.sleep(BEAT_S)


def _watch(line: socket.socket, end: Callable[[], None]) -> None:
    """Waits until the other side has closed the line, without reading from it."""
    poll = select.poll()
    poll.register(line.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poll.poll()
    end()
