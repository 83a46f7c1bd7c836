"""Events on their way out, as signed webhooks; alerts of budgets as a line in the log too.

Signed as Standard Webhooks has it (https://github.com/standard-webhooks/standard-webhooks, specification 1.0.0): a
receiver verifies `webhook-signature` with the secret, and knows by `webhook-id` what it was sent before. Whichever
gateway finds a delivery due sends it; one that is not taken is tried again after a while, longer each time.
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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from serve_app.api.errors import StoreAway
from serve_app.state.deferred.events import OPERATOR, Delivery
from serve_app.state.spending.alerts import told
from serve_app.state.state import State

log = logging.getLogger("ray.serve")

LOOK_S = 1.0
TIMEOUT_S = 15.0
# Attempts at a time, of all receivers and of one: a receiver that hangs holds nobody else up, nor do an account's many.
MAX_AT_ONCE, MAX_OF_ONE = 16, 4
SECRET_PREFIX = "whsec_"
# RFC 6052; what IANA gives out of IPv6; IPv4 for protocols (RFC 6890).
_NAT64, _UNICAST = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2000::/3")
_PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")


class Refused(Exception):
    """The receiver cannot be told, and why. ``gone``: it says itself that it wants nothing more."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


@dataclass(slots=True, frozen=True)
class Receiver:
    """``secret``: "whsec_" and base64. ``private``: whether it may be on this machine or in a private network; if not,
    ``setting`` is what would allow it.
    """

    url: str
    secret: str = field(repr=False)
    private: bool = False
    setting: str = "SERVE_APP_WEBHOOK_PRIVATE"


class Webhooks:
    """``operator``: who gets alerts of all accounts, None for the log alone. ``private``: whether receivers of accounts
    may be on this machine or in a private network.
    """

    def __init__(self, state: State, operator: Receiver | None, *, private: bool = False) -> None:
        self._state = state
        self._operator = operator
        self.private = private
        self._task: asyncio.Task[None] | None = None
        self._under_way: dict[asyncio.Task[None], Delivery] = {}

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        """Leaves what is due to other gateways."""
        with suppress(RuntimeError):  # its loop has ended
            for task in (self._task, *self._under_way):
                if task is not None:
                    task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                while await self.send_due():
                    pass
            except StoreAway:
                pass
            except Exception as error:
                log.error("events cannot be sent", exc_info=error)
            await asyncio.sleep(LOOK_S)

    async def send_due(self) -> bool:
        """Begins to send what is due; whether there was anything."""
        busy = Counter(delivery.subscription for delivery in self._under_way.values())
        full = [name for name, count in busy.items() if count >= MAX_OF_ONE]
        # Of what is under way no account has more than leaves others a part: theirs, and that of one more.
        of_account = Counter(d.account for d in self._under_way.values() if d.subscription != OPERATOR)
        share = max(1, MAX_AT_ONCE // (len(of_account) + 1))
        crowded = [name for name, count in of_account.items() if count >= share]
        most = max((count for count in of_account.values() if count < share), default=0)
        room = min(MAX_AT_ONCE - len(self._under_way), MAX_OF_ONE, share - most)
        if room <= 0:
            return False
        found = await self._state.look(self._state.events.take, time.time(), room, full, crowded)
        for delivery in found:
            task = asyncio.ensure_future(self._tell(delivery))
            self._under_way[task] = delivery
            task.add_done_callback(self._under_way.pop)
        return bool(found)

    async def _tell(self, delivery: Delivery) -> None:
        try:
            await self.tell(delivery)
        except StoreAway:
            pass  # another gateway tries again
        except Exception as error:
            log.error("event %s cannot be sent", delivery.id, exc_info=error)

    async def tell(self, delivery: Delivery) -> None:
        """Raises `StoreAway`; then another gateway tries again."""
        events, of_operator = self._state.events, delivery.subscription == OPERATOR
        if of_operator and delivery.tries == 0:
            log.warning("alert: %s", told(orjson.loads(delivery.body)["data"]))
        to = self._operator if of_operator else Receiver(delivery.url, delivery.secret, self.private)
        if to is None:
            await self._state.look(events.delivered, delivery.id, time.time())
            return
        try:
            await send(to, delivery.id, delivery.body)
        except Refused as error:
            if error.gone and not of_operator:
                await self._state.look(events.gone, delivery, time.time())
                return
            again = await self._state.look(events.later, delivery, time.time(), str(error))
            then = "it is tried again" if again else "nobody tries again until it is replayed"
            log.warning("event %s (%s) was not taken (%s); %s", delivery.id, delivery.kind, error, then)
        else:
            await self._state.look(events.delivered, delivery.id, time.time())


async def send(to: Receiver, event_id: str, body: bytes, *, clock: Callable[[], float] = time.time) -> None:
    """Raises :class:`Refused` unless the receiver answers with a status of 2xx; it is not followed elsewhere."""
    # Few gateways ever send one.
    import httpx

    url = httpx.URL(to.url)
    headers = {"Content-Type": "application/json", "Host": url.netloc.decode()}
    headers |= signed(to.secret, event_id, int(clock()), body)
    # To the address that was checked: the name could mean another one by now.
    extensions = {"sni_hostname": url.host}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            address = await resolve(to)
            async with (
                httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client,
                # Nobody reads the answer, however long it is.
                client.stream(
                    "POST", url.copy_with(host=address), content=body, headers=headers, extensions=extensions
                ) as found,
            ):
                status = found.status_code
    except TimeoutError:
        raise Refused(f"{url.host} did not answer within {TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refused(str(error) or type(error).__name__) from None
    if not 200 <= status < 300:
        raise Refused(f"{url.host} answered with {status}", gone=status == 410)


def signed(secret: str, event_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers by which a receiver knows who sent ``body``. ``timestamp``: unix seconds."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    digest = hmac.new(key, f"{event_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    signature = f"v1,{base64.b64encode(digest).decode()}"
    return {"webhook-id": event_id, "webhook-timestamp": str(timestamp), "webhook-signature": signature}


async def resolve(to: Receiver) -> str:
    """An address of the receiver. Raises :class:`Refused` where one of its addresses is private, unless that is
    allowed.
    """
    import httpx

    url = httpx.URL(to.url)
    port = url.port or (443 if url.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Refused(f"{url.host} has no address: {error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not to.private and not all(map(is_public, addresses)):
        # Which one it is tells of the network that the server is in.
        raise Refused(f"{url.host} has an address that is no public address; {to.setting}=true allows it")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address can be one of somebody else's on the internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        # Addresses of IPv4 in other clothes.
        nat64 = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in _NAT64 else None
        parsed = parsed.ipv4_mapped or nat64 or parsed.sixtofour or (parsed.teredo or (None, None))[1] or parsed
    # Python takes all for global that is not listed as something else.
    known = parsed in _UNICAST if isinstance(parsed, ipaddress.IPv6Address) else parsed not in _PROTOCOLS
    return known and parsed.is_global and not parsed.is_multicast
