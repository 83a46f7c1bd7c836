"""Alerts on their way out: each budget's share as a line in the log, and as a signed webhook.

Signed as Standard Webhooks has it (https://github.com/standard-webhooks/standard-webhooks, specification 1.0.0): a
receiver verifies `webhook-signature` with the secret, and knows by `webhook-id` what it was sent before. Whichever
gateway finds an alert due sends it; one that is not taken is tried again after a while, longer each time.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import orjson

from serve_app.api.errors import StoreAway
from serve_app.state.alerts import Alert
from serve_app.state.state import State

log = logging.getLogger("ray.serve")

LOOK_S = 5.0
TIMEOUT_S = 15.0
SECRET_PREFIX = "whsec_"


class Refused(Exception):
    """The receiver cannot be told, and why."""


class Alerts:
    """``url``: the receiver, None for the log only. ``secret``: "whsec_" and base64. ``private``: whether the receiver
    may be on this machine or in a private network.
    """

    def __init__(self, state: State, url: str | None, secret: str, *, private: bool = False) -> None:
        self._state = state
        self._url = url
        self._secret = secret
        self._private = private
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        """Leaves what is due to other gateways."""
        if self._task is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                while (alert := await self._state.look(self._state.alerts.take, time.time())) is not None:
                    await self.tell(alert)
            except StoreAway:
                pass
            except Exception as error:
                log.error("alerts cannot be sent", exc_info=error)
            await asyncio.sleep(LOOK_S)

    async def tell(self, alert: Alert) -> None:
        """Raises `StoreAway`; then another gateway tries again."""
        if alert.tries == 0:
            log.warning("alert: %s", alert.text)
        if self._url is None:
            await self._state.look(self._state.alerts.done, alert.id)
            return
        try:
            await send(self._url, self._secret, alert, private=self._private)
        except Refused as error:
            again = await self._state.look(self._state.alerts.later, alert, time.time())
            then = "it is tried again" if again else "nobody tries again"
            log.warning("alert %s was not taken (%s); %s", alert.id, error, then)
        else:
            await self._state.look(self._state.alerts.done, alert.id)


async def send(
    url: str, secret: str, alert: Alert, *, private: bool = False, clock: Callable[[], float] = time.time
) -> None:
    """Raises :class:`Refused` unless the receiver answers with a status of 2xx; it is not followed elsewhere."""
    # Few gateways ever send one.
    import httpx

    to = httpx.URL(url)
    address = await resolve(to.host, to.port or (443 if to.scheme == "https" else 80), private=private)
    body = orjson.dumps(alert.body)
    headers = {"Content-Type": "application/json", "Host": to.netloc.decode()}
    headers |= signed(secret, alert.id, int(clock()), body)
    # To the address that was checked: the name could mean another one by now.
    extensions = {"sni_hostname": to.host}
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            found = await client.post(to.copy_with(host=address), content=body, headers=headers, extensions=extensions)
    except httpx.HTTPError as error:
        raise Refused(str(error) or type(error).__name__) from None
    if not found.is_success:
        raise Refused(f"{to.host} answered with {found.status_code}")


def signed(secret: str, alert_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers by which a receiver knows who sent ``body``. ``timestamp``: unix seconds."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    digest = hmac.new(key, f"{alert_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    signature = f"v1,{base64.b64encode(digest).decode()}"
    return {"webhook-id": alert_id, "webhook-timestamp": str(timestamp), "webhook-signature": signature}


async def resolve(host: str, port: int, *, private: bool) -> str:
    """An address of ``host``. Raises :class:`Refused` where one of its addresses is private, unless that is allowed."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Refused(f"{host} has no address: {error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not private and (inside := [each for each in addresses if not is_public(each)]):
        raise Refused(f"{host} is {inside[0]}, which is no public address; SERVE_APP_ALERT_PRIVATE=true allows it")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address can be one of somebody else's on the internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        # Addresses of IPv4 in other clothes.
        parsed = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1] or parsed
    return parsed.is_global and not parsed.is_multicast
