"""Inbox and sender over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

import pytest

from serve_app.channel import frames
from serve_app.channel.inbox import ChannelGap, TokenInbox
from serve_app.channel.sender import TokenSender
from serve_app.sampling_params import TokenLogprobs
from serve_app.wire.address import InboxAddress
from serve_app.wire.tokens import Ack, Hello, TokenItem, Tokens
from tests.waiting import until


@pytest.fixture
async def inbox():
    inbox = TokenInbox(pause_tokens=64)
    await inbox.start()
    yield inbox
    await inbox.aclose()


@pytest.fixture
async def sender():
    sender = TokenSender("worker-1")
    yield sender
    await sender.aclose()


async def read(stream):
    ids = []
    async for item in stream:
        assert item.offset == len(ids)
        ids.extend(item.ids)
    return ids


def hang_up(inbox):
    for connection in list(inbox._connections):
        connection.close()


LIKELY, UNLIKELY = TokenLogprobs(-0.1, [(5, -0.1), (6, -2.5)]), TokenLogprobs(-9.0, [])


async def test_tokens_arrive_in_order_with_what_belongs_to_them(inbox, sender):
    stream = inbox.open_stream("s")
    sender.open("s", inbox.address)
    sender.send([TokenItem("s", 0, (5,), None, (LIKELY,), cached=3)])
    first = await anext(stream)
    assert first == TokenItem("s", 0, (5,), None, (LIKELY,), cached=3)
    sender.send([TokenItem("s", 1, (6, -7))])
    sender.send([TokenItem("s", 3, (), "stop")])
    rest = [item async for item in stream]
    assert [item.ids for item in rest] == [(6, -7), ()] and rest[-1].finish == "stop"
    await until(lambda: len(sender) == 0)
    assert sender.undelivered("s") == []
    assert inbox.workers == ["worker-1"]


async def test_one_frame_per_step_and_inbox(inbox, sender, monkeypatch):
    streams = [inbox.open_stream(f"s{i}") for i in range(10)]
    for stream in streams:
        sender.open(stream.stream_id, inbox.address)
    await until(lambda: inbox.workers)
    (connection,) = inbox._connections
    kinds = []
    handle = connection._handle
    monkeypatch.setattr(connection, "_handle", lambda message: (kinds.append(type(message)), handle(message)))
    for step in range(5):
        sender.send([TokenItem(s.stream_id, step, (step,)) for s in streams])
    await until(lambda: all(s.next_offset == 5 for s in streams))
    assert kinds == [Tokens] * 5


async def test_offsets_must_follow_on(inbox, sender):
    sender.open("s", inbox.address)
    sender.send([TokenItem("s", 0, (1,), "stop")])
    with pytest.raises(ValueError, match="is at 1"):
        sender.send([TokenItem("s", 1, (1,))])
    with pytest.raises(ValueError, match="open already"):
        sender.open("s", inbox.address)
    sender.send([TokenItem("unknown", 0, (1,))])


async def test_feeding_drops_repeats_cuts_overlaps_and_finds_gaps(inbox):
    stream = inbox.open_stream("s")
    stream.feed(TokenItem("s", 0, (1, 2), None, (LIKELY, UNLIKELY), 7))
    stream.feed(TokenItem("s", 0, (1, 2), None, (LIKELY, UNLIKELY), 7))
    stream.feed(TokenItem("s", 1, (2, 3), None, (UNLIKELY, LIKELY)))
    stream.feed(TokenItem("s", 4, (5,)))
    got = []
    with pytest.raises(ChannelGap):
        async for item in stream:
            got.append(item)
    assert got == [TokenItem("s", 0, (1, 2), None, (LIKELY, UNLIKELY), 7), TokenItem("s", 2, (3,), None, (LIKELY,))]
    resumed = inbox.open_stream("r", start=10)
    resumed.feed(TokenItem("r", 8, (8, 9), None))
    resumed.feed(TokenItem("r", 8, (8, 9, 10), "length"))
    resumed.feed(TokenItem("r", 11, (), "length"))
    assert [(i.offset, i.ids) async for i in resumed] == [(10, (10,))]


async def test_a_thousand_streams_with_random_disconnects_lose_and_repeat_nothing(inbox):
    rng = random.Random(3)
    lost = []
    senders = [TokenSender(f"w{i}", on_lost=lambda a, s: lost.append(s)) for i in range(4)]
    expected, streams = {}, {}
    for n in range(1000):
        name = f"s{n}"
        expected[name] = [rng.randrange(50_000) for _ in range(rng.randint(1, 40))]
        streams[name] = inbox.open_stream(name)
        senders[n % 4].open(name, inbox.address)
    sent = dict.fromkeys(streams, 0)
    readers = {name: asyncio.create_task(read(stream)) for name, stream in streams.items()}

    async def run(worker, names):
        while names:
            items = []
            for name in rng.sample(names, min(len(names), 120)):
                at = sent[name]
                ids = tuple(expected[name][at : at + rng.randint(1, 4)])
                sent[name] = at + len(ids)
                done = sent[name] == len(expected[name])
                items.append(TokenItem(name, at, ids, "stop" if done else None))
                if done:
                    names.remove(name)
            worker.send(items)
            await asyncio.sleep(rng.choice((0, 0.001, 0.01)))

    async def chaos():
        while True:
            await asyncio.sleep(rng.uniform(0.01, 0.06))
            if inbox._connections:
                rng.choice(list(inbox._connections)).close()

    breaking = asyncio.create_task(chaos())
    async with asyncio.timeout(60):
        await asyncio.gather(
            *(run(worker, [f"s{n}" for n in range(1000) if n % 4 == i]) for i, worker in enumerate(senders))
        )
        await asyncio.sleep(0.3)
        breaking.cancel()
        for name, reader in readers.items():
            assert await reader == expected[name]
        for worker in senders:
            await until(lambda worker=worker: len(worker) == 0)
    assert lost, "the test must have broken connections"
    for worker in senders:
        await worker.aclose()


async def test_a_complete_answer_without_any_connection(inbox, sender):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = InboxAddress("127.0.0.1", probe.getsockname()[1], b"x")
        stream = inbox.open_stream("s")
        sender.open("s", nobody)
        for i in range(5):
            sender.send([TokenItem("s", i, (i,), "stop" if i == 4 else None)])
        await asyncio.sleep(0.1)
        for item in sender.undelivered("s"):
            stream.feed(item)
        sender.close("s")
    assert await read(stream) == [0, 1, 2, 3, 4]
    await until(lambda: not sender._connections)


async def test_what_the_channel_delivered_and_the_unary_result_overlap(inbox, sender):
    stream = inbox.open_stream("s")
    sender.open("s", inbox.address)
    sender.send([TokenItem("s", 0, (1, 2, 3))])
    await anext(stream)
    hang_up(inbox)
    sender.send([TokenItem("s", 3, (4,), "stop")])
    for item in sender.undelivered("s"):
        stream.feed(item)
    assert [i async for i in stream] == [TokenItem("s", 3, (4,), "stop")]


async def test_a_wrong_secret_gets_nothing_in(inbox):
    losses = []
    sender = TokenSender("w", on_lost=lambda address, streams: losses.append(streams))
    stream = inbox.open_stream("s")
    sender.open("s", InboxAddress(inbox.address.host, inbox.address.port, b"wrong"))
    sender.send([TokenItem("s", 0, (1,))])
    await until(lambda: len(losses) >= 2)
    assert stream.next_offset == 0 and inbox.workers == []
    assert sender.undelivered("s") == [TokenItem("s", 0, (1,))]
    await sender.aclose()


@pytest.mark.parametrize("authenticated", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95\x00\x00\x00\x00 this is no frame",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frames.encode(Tokens((TokenItem("s", 0, "123"),))),
        frames.encode(Tokens("s")),
        frames.encode(Tokens((TokenItem("s", 0, (1,), None, ()),))),
        frames.encode(Ack(())),
        b"\x00\x00\x00\x01\x63",
    ],
)
async def test_malformed_frames_close_the_connection_and_nothing_else(inbox, sender, data, authenticated):
    stream = inbox.open_stream("s")
    reader, writer = await asyncio.open_connection(inbox.address.host, inbox.address.port)
    if authenticated:
        writer.write(frames.encode(Hello(inbox.address.secret, "evil")))
    writer.write(data)
    async with asyncio.timeout(60):
        # The far side aborts: end of file or a reset, depending on what it had read.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    assert stream.next_offset == 0
    sender.open("s", inbox.address)
    sender.send([TokenItem("s", 0, (1,), "stop")])
    assert await read(stream) == [1]


async def test_a_slow_reader_is_paused_and_its_neighbour_is_not(inbox, sender):
    slow, quick = inbox.open_stream("slow"), inbox.open_stream("quick")
    sender.open("slow", inbox.address)
    sender.open("quick", inbox.address)
    reading = asyncio.create_task(read(quick))
    for i in range(2000):
        finish = "stop" if i == 1999 else None
        sender.send([TokenItem("slow", i, (i,), finish), TokenItem("quick", i, (i,), finish)])
        if i % 20 == 0:
            await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        assert await reading == list(range(2000))
    # Nothing was read from the slow one: it holds a bounded number of tokens, the worker keeps the rest.
    assert slow.next_offset <= 64 * 2 + 1
    assert sender._streams["slow"].paused
    async with asyncio.timeout(60):
        assert await read(slow) == list(range(2000))


async def test_a_paused_stream_is_paused_again_after_a_reconnect(inbox, sender):
    stream = inbox.open_stream("s")
    sender.open("s", inbox.address)
    sender.send([TokenItem("s", 0, tuple(range(65)))])
    await until(lambda: sender._streams["s"].paused)
    hang_up(inbox)
    old = stream._source
    sender.send([TokenItem("s", 65, (65,))])
    await until(lambda: stream._source is not old and stream._paused)
    await until(lambda: sender._streams["s"].paused)
    sender.send([TokenItem("s", 66, (66,), "stop")])
    assert await read(stream) == list(range(67))


async def test_a_worker_that_ignores_the_pause_can_not_fill_memory(inbox):
    stream, other = inbox.open_stream("s"), inbox.open_stream("other")
    _, writer = await asyncio.open_connection(inbox.address.host, inbox.address.port)
    writer.write(frames.encode(Hello(inbox.address.secret, "rude")))
    for i in range(300):
        writer.write(frames.encode(Tokens((TokenItem("s", i, (1,)),))))
    writer.write(frames.encode(Tokens((TokenItem("other", 0, (1,), "stop"),))))
    assert await read(other) == [1]
    assert stream.next_offset == 64 * 2 + 1
    # The unary result completes the stream whatever the channel did.
    stream.feed(TokenItem("s", 100, (1,) * 200, "stop"))
    assert await read(stream) == [1] * 300
    writer.close()


async def test_a_closed_stream_tells_its_worker(inbox):
    closed = []
    sender = TokenSender("w", on_closed=closed.append)
    stream = inbox.open_stream("s")
    sender.open("s", inbox.address)
    sender.send([TokenItem("s", 0, (1,))])
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(ConnectionAbortedError):
        await waiting
    await until(lambda: closed == ["s"])
    # Never opened, or closed before its first token: the first frame finds nobody.
    sender.open("t", inbox.address)
    sender.send([TokenItem("t", 0, (1,))])
    await until(lambda: closed == ["s", "t"])
    assert len(sender) == 0 and len(inbox) == 0
    await sender.aclose()


async def test_an_item_with_too_many_log_probabilities_keeps_its_tokens(inbox, sender):
    stream = inbox.open_stream("s")
    sender.open("s", inbox.address)
    many = TokenLogprobs(-1.0, [(token, -1.5) for token in range(frames.MAX_FRAME // 10)])
    sender.send([TokenItem("s", 0, (1, 2), None, (many, UNLIKELY))])
    sender.send([TokenItem("s", 2, (3,), "stop")])
    assert await read(stream) == [1, 2, 3]


async def test_a_gateway_that_comes_up_late_gets_everything(sender):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inbox = TokenInbox(port=port)
    address = InboxAddress("127.0.0.1", port, inbox._secret)
    sender.open("s", address)
    sender.send([TokenItem("s", 0, (1,))])
    await asyncio.sleep(0.1)
    await inbox.start()
    stream = inbox.open_stream("s")
    sender.send([TokenItem("s", 1, (2,), "stop")])
    async with asyncio.timeout(60):
        assert await read(stream) == [1, 2]
    await inbox.aclose()
