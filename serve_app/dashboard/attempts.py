"""How often an address may try to sign in with what is no key."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from starlette.requests import Request

from serve_app.api.errors import RateLimited

WINDOW_S = 60.0
MOST = 10
# Addresses that are remembered; those that failed longest ago are forgotten first.
_KNOWN = 10_000


def address_of(request: Request) -> str:
    """The client's, as HAProxy has seen it; of IPv6 the network that one subscriber has."""
    # HAProxy writes this header over whatever a client sent.
    found = request.headers.get("x-serve-app-client") or (request.client.host if request.client is not None else "")
    try:
        address = ipaddress.ip_address(found)
    except ValueError:
        return found[:64]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


class Attempts:
    """Failures of one gateway's clients in windows that begin with the first of them."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def check(self, address: str, now: float) -> None:
        """Raises :class:`RateLimited`."""
        since, count = self._failed.get(address, (now, 0))
        if count >= MOST and now - since < WINDOW_S:
            raise RateLimited(f"{MOST} wrong keys within a minute. Wait a moment.", since + WINDOW_S - now, {})

    def failed(self, address: str, now: float) -> None:
        since, count = self._failed.pop(address, (now, 0))
        if now - since >= WINDOW_S:
            since, count = now, 0
        self._failed[address] = since, count + 1
        while len(self._failed) > _KNOWN:
            self._failed.popitem(last=False)
