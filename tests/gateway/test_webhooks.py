"""Webhooks: each event once in the outbox, signed so that a receiver can tell, and to no private address unasked."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import orjson
import pytest

from serve_app.api.errors import StoreAway
from serve_app.gateway import webhooks as sending
from serve_app.gateway.webhooks import Receiver, Refused, Webhooks, is_public, resolve, send, signed
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import MICRO
from serve_app.state.deferred.batches import Batch
from serve_app.state.deferred.events import OPERATOR
from serve_app.state.errors import Away
from serve_app.state.spending.alerts import Alert, told
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.quotas import MONEY, NEURONS, Quota, Want
from serve_app.state.store.deferred.events import BACKOFF_S
from serve_app.state.store.sql import SqlStore

SECRET = "whsec_plJ3nmyCDGBKInavdOK15jsl"
NOON = 1_795_262_400
DAY = NOON // 86400 * 86400
QUOTA = Quota("team-a", "", NEURONS)
ALERT = orjson.dumps(Alert("team-a", "k1", NEURONS, DAY, 80, 8_500_000, 10 * MICRO, NOON + 0.5).event.body)
BATCH = Batch("b" * 32, "openai", Caller("team-a"), NOON, NOON + 60, 60, "completed", about=b'{"id": "batch_1"}')


class Here:
    """The state of a gateway, as far as webhooks ask for it."""

    def __init__(self, store: SqlStore) -> None:
        self.events = store.events

    async def look(self, look, *asked):
        try:
            return look(*asked)
        except Away as away:
            raise StoreAway from away


class Endpoint:
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
async def receiver() -> AsyncIterator[tuple[Endpoint, str]]:
    found = Endpoint()
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
    store.leases.lease(owner, NOON, [Want(QUOTA, DAY, 10 * MICRO, 0, 0, 0, refused=refused)])


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
        await send(Receiver(url, SECRET, private=True), "msg_1", ALERT, clock=lambda: NOON)
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
    alert = Alert("team-a", "", f"{MONEY}:EUR", DAY, 100, 25 * 10**9, 25 * 10**9, NOON)
    data = alert.event.body["data"]
    assert told(data) == "account team-a: 100 % of the budget of 25 EUR a month is used (25)"
    assert (data["limit"], data["used"], data["of"], data["currency"]) == ("money_per_month", "25", "25", "EUR")


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_only_success_is_success_and_nothing_is_followed(status):
    async with receiver() as (found, url):
        found.statuses = [status]
        with pytest.raises(Refused, match=f"answered with {status}"):
            await send(Receiver(url, SECRET, private=True), "msg_1", ALERT)
        assert len(found.got) == 1


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1", "::1",
     "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "2002:0a00:0001::", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1",
     "64:ff9b:1::1", "::7f00:1", "::ffff:0:7f00:1", "fec0::1", "::", "192.0.0.8", "240.0.0.1", "2001:db8::1",
     "5f00::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


async def test_no_private_receiver_unless_it_is_allowed():
    assert is_public("1.1.1.1") and is_public("2606:4700:4700::1111") and is_public("64:ff9b::101:101")
    async with receiver() as (found, url):
        with pytest.raises(Refused, match="no public address; SERVE_APP_WEBHOOK_PRIVATE=true allows it"):
            await send(Receiver(url, SECRET), "msg_1", ALERT)
        assert not found.got
    assert await resolve(Receiver("http://127.0.0.1", "", private=True)) == "127.0.0.1"


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
            gateways = [Webhooks(Here(store), Receiver(url, SECRET, private=True)) for _ in range(2)]
            for gateway in gateways:
                for delivery in store.events.take(time.time(), 2):
                    await gateway.tell(delivery)
    got = [orjson.loads(body)["data"] for _, body in found.got]
    assert sorted((one["share"], one["used"]) for one in got) == [(50, "6"), (80, "8"), (100, "8")]
    assert "account team-a: 80 % of the budget of 10 neurons a day is used (8)" in caplog.text
    assert len(caplog.records) == 3


def batch_ends(store: SqlStore, **fields) -> None:
    with store.database.writing() as connection:
        store.events.batch(connection, BATCH, NOON)


async def test_one_that_is_not_taken_is_tried_again_for_three_days_and_then_replayed(store, monkeypatch, caplog):
    assert 71 * 3600 < sum(BACKOFF_S) <= 72 * 3600
    now = NOON + 1.0
    monkeypatch.setattr(sending.time, "time", lambda: now)
    async with receiver() as (found, url):
        webhook = store.events.subscribe("team-a", now, kinds=["batch.*"], url=url)
        batch_ends(store)
        found.statuses = [500] * 20
        gateway = Webhooks(Here(store), None, private=True)
        with caplog.at_level(logging.WARNING, logger="ray.serve"):
            for wait in (0.0, *BACKOFF_S):
                assert not wait or not store.events.take(now + wait - 1, 4)
                now += wait
                (delivery,) = store.events.take(now, 4)
                # While one tries, nobody else does.
                assert not store.events.take(now, 4)
                await gateway.tell(delivery)
        assert not store.events.take(now + 10**6, 4)
        (dead,) = store.events.deliveries(webhook.id)
        assert (dead.status, dead.tries) == ("dead", len(BACKOFF_S) + 1) and "answered with 500" in dead.trouble
        assert "nobody tries again until it is replayed" in caplog.text
        found.statuses = []
        assert store.events.replay(webhook.id, now) == 1
        await gateway.tell(*store.events.take(now, 4))
        assert store.events.deliveries(webhook.id)[0].status == "delivered"
        assert store.events.replay(webhook.id, now) == 0 and store.events.replay(webhook.id, now, everything=True) == 1
        assert len({headers["webhook-id"] for headers, _ in found.got}) == 1
        assert len(found.got) == len(BACKOFF_S) + 2


async def test_what_comes_is_what_openais_sdk_unwraps(store, monkeypatch):
    async with receiver() as (found, url):
        webhook = store.events.subscribe("team-a", NOON, kinds=["batch.completed"], url=url)
        store.events.subscribe("team-b", NOON, kinds=["*"], url=url)
        batch_ends(store)
        gateway = Webhooks(Here(store), None, private=True)
        assert await gateway.send_due()
        while gateway._under_way:
            await asyncio.gather(*gateway._under_way)
        assert not await gateway.send_due()
    ((headers, body),) = found.got
    client = openai.OpenAI(api_key="none", webhook_secret=webhook.secret)
    event = client.webhooks.unwrap(body.decode(), headers)
    assert (event.type, event.data.id) == ("batch.completed", "batch_1")
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.decode() + " ", headers)


async def test_a_receiver_that_is_gone_is_told_no_more(store):
    async with receiver() as (found, url):
        webhook = store.events.subscribe("team-a", NOON, kinds=["*"], url=url)
        batch_ends(store)
        found.statuses = [410]
        await Webhooks(Here(store), None, private=True).tell(*store.events.take(NOON + 1, 4))
        batch_ends(store)
        assert not store.events.subscriptions("team-a")[0].enabled and not store.events.take(NOON + 10**6, 4)
        store.events.change("team-a", webhook.id, NOON, enabled=True)
        batch_ends(store)
        assert len(store.events.take(NOON + 1, 4)) == 1


async def test_a_receiver_that_hangs_holds_no_other_up(store, monkeypatch):
    monkeypatch.setattr(sending, "TIMEOUT_S", 30.0)
    async with receiver() as (found, url):
        held: list[object] = []  # since Python 3.13 a connection ends with the last reference to its writer
        silent = await asyncio.start_server(lambda *streams: held.append(streams), "127.0.0.1", 0)
        hangs = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/"
        store.events.subscribe("team-a", NOON, kinds=["*"], url=hangs)
        for _ in range(9):
            batch_ends(store)
        store.events.subscribe("team-a", NOON, kinds=["*"], url=url)
        batch_ends(store)
        gateway = Webhooks(Here(store), None, private=True)
        while not found.got:
            await gateway.send_due()
            await asyncio.sleep(0)
        gateway.close()
        silent.close()


async def test_an_account_whose_receivers_all_hang_holds_no_other_account_up(store, monkeypatch):
    monkeypatch.setattr(sending, "TIMEOUT_S", 30.0)
    async with receiver() as (found, url):
        held: list[object] = []  # since Python 3.13 a connection ends with the last reference to its writer
        silent = await asyncio.start_server(lambda *streams: held.append(streams), "127.0.0.1", 0)
        hangs = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/"
        for _ in range(9):
            store.events.subscribe("team-a", NOON, kinds=["*"], url=hangs)
        for _ in range(4):
            batch_ends(store)
        gateway = Webhooks(Here(store), None, private=True)
        while await gateway.send_due():
            pass
        assert 0 < len(gateway._under_way) <= sending.MAX_AT_ONCE // 2
        store.events.subscribe("team-b", NOON, kinds=["*"], url=url)
        with store.database.writing() as connection:
            store.events.batch(connection, replace(BATCH, caller=Caller("team-b")), NOON)
        while not found.got:
            await gateway.send_due()
            await asyncio.sleep(0)
        gateway.close()
        silent.close()


async def test_a_gateway_that_dies_over_one_leaves_it_to_the_next(store):
    spend(store, "r1", 5)
    assert [each.subscription for each in store.events.take(NOON + 1, 4)] == [OPERATOR]
    assert store.events.take(NOON + 2, 4) == []
    assert len(store.events.take(NOON + 62, 4)) == 1


async def test_without_a_receiver_the_log_is_all(store, caplog):
    spend(store, "r1", 5)
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        await Webhooks(Here(store), None).tell(*store.events.take(NOON + 1, 4))
    assert "50 %" in caplog.text and not store.events.take(NOON + 10**6, 4)
