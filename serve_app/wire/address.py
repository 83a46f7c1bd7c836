"""Where a gateway listens for workers."""

from __future__ import annotations

import msgspec


class InboxAddress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A gateway's token inbox, and the secret that lets a worker in. Travels inside requests."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"InboxAddress({self.host!r}, {self.port})"
