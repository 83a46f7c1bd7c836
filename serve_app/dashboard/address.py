"""Whose attempts to sign in are counted together."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request


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
