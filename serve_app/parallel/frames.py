"""Messages on a line between ranks: four bytes of length (little endian), then one message of
:mod:`serve_app.wire.ranks`.
"""

from __future__ import annotations

import socket
import struct

from serve_app.wire.message import BadMessage, Message

LENGTH = struct.Struct("<I")
MOST_BYTES = 1 << 30
# After so many seconds without a word the kernel asks the other side's kernel, every second, and gives up after GONE_S
# in all. A kernel answers for a process that is busy or stopped, and not for a machine that is gone.
QUIET_S = 3
GONE_S = 8


def prepare_line(line: socket.socket) -> None:
    """Words leave at once, and the line ends soon after the machine at its other end is gone."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_S - QUIET_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)


def framed(message: Message) -> bytes:
    """A message as it travels."""
    data = message.encode()
    return LENGTH.pack(len(data)) + data


def send(line: socket.socket, message: Message) -> None:
    line.sendall(framed(message))


def receive(line: socket.socket) -> memoryview | None:
    """The next message. None: the other side has gone."""
    head = _exactly(line, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MOST_BYTES:
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


class Heard:
    """What has come on a line, cut into messages; never waits for the rest of one."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = bytearray()

    def take(self) -> list[bytes] | None:
        """The messages that are complete now. None: the other side has gone. Raises :class:`BadMessage`."""
        try:
            got = self._line.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not got:
            return None
        self._rest += got
        found, at = [], 0
        while len(self._rest) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._rest, at)
            if length > MOST_BYTES:
                raise BadMessage(f"a message of {length} bytes; the other side is no rank")
            if len(self._rest) - at < LENGTH.size + length:
                break
            at += LENGTH.size
            found.append(bytes(self._rest[at : at + length]))
            at += length
        del self._rest[:at]
        return found
