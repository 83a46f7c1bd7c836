"""Where a request comes from, as HAProxy has seen it."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request

# HAProxy writes this header over whatever a client sent.
CLIENT = "x-serve-app-client"
# What proxies on this machine add: then it is not known where the request began.
_PROXIED = ("x-forwarded-for", "forwarded", "via", "x-real-ip")


def is_local(request: Request) -> bool:
    """Whether a process of this machine asks by an address of loopback, and no page of a browser does so for it."""
    peer = request.client.host if request.client is not None else ""
    seen = request.headers.get(CLIENT, peer)
    if not (_is_loopback(peer) and _is_loopback(seen)) or any(name in request.headers for name in _PROXIED):
        return False
    host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
    # A name that leads here is somebody else's to choose.
    return host == "localhost" or _is_loopback(host.strip("[]"))


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
