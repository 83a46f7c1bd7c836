"""Faults of the network between processes of one user, without root: packets that are dropped, connections that are
cut, and a TCP proxy in front of the store.

Packets are dropped by a classic BPF filter on the receiving socket (``SO_ATTACH_FILTER``, Linux's socket(7)); its
random numbers are the kernel's. The other process's socket is had by ``pidfd_getfd`` (Linux 5.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

PIDFD_GETFD = 438
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
LOAD_RANDOM, JUMP_IF_GREATER, RETURN = 0x20, 0x25, 0x06
RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
KEEP = 0xFFFFFFFF
# So much is told at once, however late the rest is; how long readers have to take what has come.
LATE_BYTES, TOLD_S = 1 << 20, 0.02
_LIBC = ctypes.CDLL(None, use_errno=True)

Ends = dict[tuple[str, str], tuple[int, int]]


def can_reach_sockets() -> str | None:
    """Why sockets of other processes cannot be had here; None if they can."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            _socket_of(os.getpid(), ours.fileno()).close()
        except OSError as error:
            return f"sockets of other processes cannot be had here ({error.strerror})"
    return None


@contextlib.contextmanager
def lossy(ours: Iterable[int], theirs: Iterable[int], share: float) -> Iterator[int]:
    """Drops a share of the packets between processes, both ways, on the connections that there are; how many."""
    sockets = list(_between(list(ours), list(theirs)))
    program = [
        (LOAD_RANDOM, 0, 0, RANDOM),
        (JUMP_IF_GREATER, 1, 0, min(KEEP, int(share * 2**32))),
        (RETURN, 0, 0, 0),
        (RETURN, 0, 0, KEEP),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    for one in sockets:
        with contextlib.suppress(OSError):  # it has closed meanwhile
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
    try:
        yield len(sockets) // 2
    finally:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            one.close()


@contextlib.contextmanager
def late(ours: Iterable[int], theirs: Iterable[int], seconds: float) -> Iterator[int]:
    """What processes send each other on the connections that there are is told to the reader up to ``seconds`` later,
    in the order in which it came: until then fewer bytes have come than it waits for (``SO_RCVLOWAT``). How many.
    """
    sockets, over = list(_between(list(ours), list(theirs))), threading.Event()

    def want(count: int) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):  # it has closed meanwhile
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def pulse() -> None:
        while not over.is_set():
            want(LATE_BYTES)
            over.wait(seconds)
            want(1)
            time.sleep(TOLD_S)

    pulsing = threading.Thread(target=pulse, daemon=True)
    pulsing.start()
    try:
        yield len(sockets) // 2
    finally:
        over.set()
        pulsing.join()
        for one in sockets:
            one.close()


def cut(ours: Iterable[int], theirs: Iterable[int]) -> int:
    """Ends the connections between processes, as a network that has come back does; how many."""
    sockets = list(_between(list(ours), list(theirs)))
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
    return len(sockets) // 2


def listener(pids: Iterable[int], port: int) -> int | None:
    """Which of the processes listens at this port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    wanted = {f[9] for f in lines if f[3] == "0A" and int(f[1].rpartition(":")[2], 16) == port}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(entry)[len("socket:[") : -1] in wanted:
                        return pid
    return None


def _between(ours: list[int], theirs: list[int]) -> Iterator[socket.socket]:
    """Both ends of each TCP connection between two groups of processes."""
    addresses = dict(_connections())
    a, b = _ends(ours, addresses), _ends(theirs, addresses)
    for (local, remote), (pid, number) in a.items():
        if other := b.get((remote, local)):
            with contextlib.suppress(OSError):
                yield _socket_of(pid, number)
                yield _socket_of(*other)


def _connections() -> Iterator[tuple[str, tuple[str, str]]]:
    """Inode and addresses of all established TCP connections. IPv4 addresses that came by IPv6 look like IPv4's."""
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":
                yield fields[9], (_plain(fields[1]), _plain(fields[2]))


def _plain(address: str) -> str:
    host, port = address.split(":")
    return f"{host[-8:]}:{port}"


def _ends(pids: list[int], addresses: dict[str, tuple[str, str]]) -> Ends:
    found: Ends = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    link = os.readlink(entry)
                    if link.startswith("socket:[") and (pair := addresses.get(link[8:-1])):
                        found[pair] = (pid, int(entry.name))
    return found


def _socket_of(pid: int, number: int) -> socket.socket:
    """A copy of another process's socket. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        copy = _LIBC.syscall(PIDFD_GETFD, process, number, 0)
        if copy < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return socket.socket(fileno=copy)
    finally:
        os.close(process)


def _probe(taken: socket.socket) -> None:
    """Notices a client that is gone, as the server behind would."""
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        taken.setsockopt(socket.IPPROTO_TCP, option, value)


Mode = Literal["through", "refuse", "silent", "slow"]
SLOW_S = 0.15


class Proxy:
    """A TCP proxy in a thread of its own. ``mode``: whether it passes all, hangs up on everybody, says nothing, or
    passes each piece after 0.15 s.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._mode: Mode = "through"
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = server.result(10)
        self.port = self._server.sockets[0].getsockname()[1]

    def set(self, mode: Mode) -> None:
        self._mode = mode
        if mode == "refuse":
            self._loop.call_soon_threadsafe(self._hang_up)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _end(self) -> None:
        self._server.close()
        self._hang_up()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _hang_up(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        _probe(writer.get_extra_info("socket"))
        try:
            if self._mode == "refuse":
                return
            back, forth = await asyncio.open_connection(*self._upstream)
            self._open.add(forth)
            try:
                await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))
            finally:
                self._open.discard(forth)
                forth.close()
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            while self._mode == "silent":
                await asyncio.sleep(0.02)
            if self._mode == "slow":
                await asyncio.sleep(SLOW_S)
            writer.write(data)
            await writer.drain()
        writer.close()
