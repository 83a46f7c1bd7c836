"""Who comes to rank 0: strangers cost nothing and hold nobody up, and who shows the token is let in."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from serve_app.parallel.frames import LENGTH
from serve_app.wire.message import BadMessage
from serve_app.wire.ranks import RankHello, read_from_rank

# Who has not said who it is: no more bytes, seconds and lines than these.
HELLO_BYTES = 1024
HELLO_S = 10.0
MOST_STRANGERS = 64


@dataclass(slots=True)
class _Stranger:
    until: float
    said: bytearray = field(default_factory=bytearray)


def admitted(
    listener: socket.socket, token: str, ranks: int, until: float
) -> Generator[tuple[RankHello, socket.socket], None, None]:
    """Each rank that comes before ``until`` (monotonic), with its line. Ends then."""
    listener.setblocking(False)
    strangers: dict[socket.socket, _Stranger] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def leave(line: socket.socket) -> None:
            selector.unregister(line)
            del strangers[line]

        try:
            while (now := time.monotonic()) < until:
                for line in [line for line, stranger in strangers.items() if stranger.until < now]:
                    leave(line)
                    line.close()
                for key, _ in selector.select(min(1.0, until - now)):
                    line = key.fileobj  # type: ignore[assignment]
                    if line is listener:
                        if (new := _accept(listener)) is not None:
                            if len(strangers) >= MOST_STRANGERS:
                                oldest = next(iter(strangers))
                                leave(oldest)
                                oldest.close()
                            strangers[new] = _Stranger(now + HELLO_S)
                            selector.register(new, selectors.EVENT_READ)
                        continue
                    said = _hear(line, strangers[line].said)
                    if said is None:
                        continue
                    leave(line)
                    if said and (hello := _hello(said, token, ranks)) is not None:
                        line.setblocking(True)
                        yield hello, line
                    else:
                        line.close()
        finally:
            for line in strangers:
                line.close()


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        line, _ = listener.accept()
    except OSError:
        return None
    line.setblocking(False)
    return line


def _hear(line: socket.socket, said: bytearray) -> bytes | None:
    """The one message of a stranger, b"" where there will be none, None where it is still to come."""
    wanted = LENGTH.size if len(said) < LENGTH.size else LENGTH.size + LENGTH.unpack_from(said)[0]
    if wanted > HELLO_BYTES:
        return b""
    try:
        got = line.recv(wanted - len(said))
    except BlockingIOError:
        return None
    except OSError:
        return b""
    if not got:
        return b""
    said += got
    if len(said) < LENGTH.size or len(said) < LENGTH.size + LENGTH.unpack_from(said)[0]:
        return None
    return bytes(said[LENGTH.size :])


def _hello(said: bytes, token: str, ranks: int) -> RankHello | None:
    try:
        hello = read_from_rank(said)
    except BadMessage:
        return None
    right = isinstance(hello, RankHello) and secrets.compare_digest(hello.token.encode(), token.encode())
    return hello if right and isinstance(hello, RankHello) and 0 < hello.rank < ranks else None
