"""Inner ports of a server on one machine: free, and given to no other server that starts in the same seconds.

Between the choice of a port and its use lie seconds in which it is still free for others. So the choice itself is held,
by a socket in Linux' abstract namespace (unix(7)): one name per port, which has no file and is gone with its process.
Where there is no such namespace, only what already listens is avoided.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable

TRIED = 100


class InnerPorts:
    """Ports that this object holds until it is closed, or its process ends."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def choose(self, wanted: Iterable[int]) -> list[int]:
        """For each of ``wanted`` that port, or the next one that is free; the port itself where none of 100 is."""
        return [self._from(port) for port in wanted]

    def close(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def _from(self, port: int) -> int:
        for candidate in range(port, min(port + TRIED, 65536)):
            if _free(candidate) and self._hold(candidate):
                return candidate
        return port

    def _hold(self, port: int) -> bool:
        if sys.platform != "linux":
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0serve-app inner port {port}")
        except OSError:
            name.close()
            return False
        self._held.append(name)
        return True


def _free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
