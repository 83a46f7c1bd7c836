"""Alerts: each share once over all gateways, signed so that a receiver can tell, and to no private address unasked."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from serve_app.api.errors import StoreAway
from serve_app.gateway import alerts as sending
from serve_app.gateway.alerts import Alerts, Refused, is_public, resolve, send, signed
from serve_app.state.alerts import Alert
from serve_app.state.errors import Away
from serve_app.state.ledger import Entry
from serve_app.state.limits import MICRO
from serve_app.state.quotas import MONEY, NEURONS, Quota, Want
from serve_app.state.store.alerts import BACKOFF_S
from serve_app.state.store.sql import SqlStore

SECRET = "whsec_plJ3nmyCDGBKInavdOK15jsl"
NOON = 1_795_262_400
DAY = NOON // 86400 * 86400
QUOTA = Quota("team-a", "", NEURONS)
ALERT = Alert("msg_1", "team-a", "k1", NEURONS, DAY, 80, 8_500_000, 10 * MICRO, NOON + 0.5)


class Here:
    """The state of a gateway, as far as alerts ask for it."""

    def __init__(self, store: SqlStore) -> None:
        self.alerts = store.alerts

    async def look(self, look, *asked):
        try:
            return look(*asked)
        except Away as away:
            raise StoreAway from away


class Receiver:
    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.got: list[tuple[dict[str, str], bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:]) if name}
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((headers, body))
        status = self.statuses.pop(0) if self.statuses else 204
        writer.write(b"HTTP/1.1 %d x\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n" % status)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    found = Receiver()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    try:
        yield found, f"http://localhost:{server.sockets[0].getsockname()[1]}/hook?a=b"
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
def store(tmp_path):
    with SqlStore(tmp_path) as found:
        found.open()
        yield found


def spend(store: SqlStore, name: str, neurons: int, *, refused: bool = False, owner: str = "g") -> None:
    """Work of ``neurons`` is in the ledger, and a gateway looks."""
    entry = Entry(name, "team-a", "k1", NOON, 1.0, "m", "t", "done", {}, neurons * MICRO, 0, "USD")
    store.write([entry.row()])
    store.leases.lease(owner, NOON, [Want(QUOTA, DAY, 10 * MICRO, 0, 0, refused=refused)])


def test_signed_as_standard_webhooks_has_it():
    """The example of the scheme's first implementation (Svix, "verifying payloads manually")."""
    body = b'{"event_type":"ping","data":{"success":true}}'
    assert signed(SECRET, "msg_loFOjxBNrRLzqYUf", 1731705121, body) == {
        "webhook-id": "msg_loFOjxBNrRLzqYUf",
        "webhook-timestamp": "1731705121",
        "webhook-signature": "v1,rAvfW3dJ/X/qxhsaXPOyyCGmRKsaKWcsNccKXlIktD0=",
    }


async def test_what_the_receiver_gets():
    async with receiver() as (found, url):
        await send(url, SECRET, ALERT, private=True, clock=lambda: NOON)
    headers, body = found.got[0]
    assert headers["content-type"] == "application/json" and headers["host"].startswith("localhost:")
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(base64.b64decode(SECRET[6:]), content, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    assert orjson.loads(body) == {
        "type": "budget.reached",
        "timestamp": "2026-11-21T12:00:00Z",
        "data": {
            "account": "team-a",
            "key": "k1",
            "limit": "neurons_per_day",
            "share": 80,
            "used": "8.5",
            "of": "10",
            "since": "2026-11-21T00:00:00Z",
        },
    }


def test_money_tells_its_currency():
    alert = Alert("msg_1", "team-a", "", f"{MONEY}:EUR", DAY, 100, 25 * 10**9, 25 * 10**9, NOON)
    assert alert.text == "account team-a: 100 % of the budget of 25 EUR a month is used (25)"
    told = alert.body["data"]
    assert (told["limit"], told["used"], told["of"], told["currency"]) == ("money_per_month", "25", "25", "EUR")


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_only_success_is_success_and_nothing_is_followed(status):
    async with receiver() as (found, url):
        found.statuses = [status]
        with pytest.raises(Refused, match=f"answered with {status}"):
            await send(url, SECRET, ALERT, private=True)
        assert len(found.got) == 1


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1", "::1",
     "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "2002:0a00:0001::"],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


async def test_no_private_receiver_unless_it_is_allowed():
    assert is_public("1.1.1.1") and is_public("2606:4700:4700::1111")
    async with receiver() as (found, url):
        with pytest.raises(Refused, match="no public address; SERVE_APP_ALERT_PRIVATE=true allows it"):
            await send(url, SECRET, ALERT)
        assert not found.got
    assert await resolve("127.0.0.1", 80, private=True) == "127.0.0.1"


async def test_each_share_once_whoever_notices_it(store, caplog, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOON + 1.0)
    spend(store, "r1", 4)
    assert store.alerts.all() == []
    for number in range(3):
        spend(store, f"r{number + 2}", 2 if number < 1 else 0, owner=f"g{number}")
    with SqlStore(store.database.home) as elsewhere:
        spend(elsewhere, "r5", 2)
    assert sorted(alert.share for alert in store.alerts.all()) == [50, 80]
    # A budget that has refused something is used up.
    spend(store, "r6", 0, refused=True)
    async with receiver() as (found, url):
        with caplog.at_level(logging.WARNING, logger="ray.serve"):
            gateways = [Alerts(Here(store), url, SECRET, private=True) for _ in range(2)]
            for gateway in gateways:
                while (alert := store.alerts.take(time.time())) is not None:
                    await gateway.tell(alert)
    told = [orjson.loads(body)["data"] for _, body in found.got]
    assert sorted((one["share"], one["used"]) for one in told) == [(50, "6"), (80, "8"), (100, "8")]
    assert "account team-a: 80 % of the budget of 10 neurons a day is used (8)" in caplog.text
    assert len(caplog.records) == 3


async def test_one_that_is_not_taken_is_tried_again_later(store, monkeypatch, caplog):
    now = NOON + 1.0
    monkeypatch.setattr(sending.time, "time", lambda: now)
    spend(store, "r1", 5)
    async with receiver() as (found, url):
        found.statuses = [500] * 20
        gateway = Alerts(Here(store), url, SECRET, private=True)
        with caplog.at_level(logging.WARNING, logger="ray.serve"):
            for wait in (0.0, *BACKOFF_S):
                assert not wait or store.alerts.take(now + wait - 1) is None
                now += wait
                alert = store.alerts.take(now)
                # While one tries, nobody else does.
                assert store.alerts.take(now) is None
                await gateway.tell(alert)
        assert store.alerts.take(now + 10**6) is None
        assert len({headers["webhook-id"] for headers, _ in found.got}) == 1
        assert len(found.got) == len(BACKOFF_S) + 1
    assert caplog.text.count("alert: account") == 1 and "nobody tries again" in caplog.text


async def test_a_gateway_that_dies_over_one_leaves_it_to_the_next(store):
    spend(store, "r1", 5)
    assert store.alerts.take(NOON + 1).share == 50
    assert store.alerts.take(NOON + 2) is None
    assert store.alerts.take(NOON + 62).share == 50


async def test_without_a_receiver_the_log_is_all(store, caplog):
    spend(store, "r1", 5)
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        await Alerts(Here(store), None, "").tell(store.alerts.take(NOON + 1))
    assert "50 %" in caplog.text and store.alerts.take(NOON + 10**6) is None
