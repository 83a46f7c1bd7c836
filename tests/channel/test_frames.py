from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel import frames
from serve_app.channel.frames import FrameReader
from serve_app.sampling_params import TokenLogprobs
from serve_app.wire.address import InboxAddress
from serve_app.wire.message import BadMessage, WrongVersion
from serve_app.wire.tokens import Hello, TokenItem, Tokens, read_from_worker

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(tuple)


@given(st.text(max_size=9), st.integers(0, 2**40), IDS, st.sampled_from([None, "stop"]), st.booleans(), st.booleans())
def test_items_survive_the_wire(stream, offset, ids, finish, with_logprobs, first):
    logprobs = tuple(TokenLogprobs(-0.5, [(i, -1.5)]) for i in range(len(ids))) if with_logprobs else None
    item = TokenItem(stream, offset, ids, finish, logprobs, 17 if first else None)
    reader = FrameReader(read_from_worker)
    reader.feed(frames.encode(Tokens((item,))))
    assert reader.next() == Tokens((item,))


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 20))
def test_frames_are_cut_wherever_the_network_cuts_them(secrets, step):
    stream = b"".join(frames.encode(Hello(secret, "worker")) for secret in secrets)
    reader, got = FrameReader(read_from_worker), []
    for at in range(0, len(stream), step):
        reader.feed(stream[at : at + step])
        while (message := reader.next()) is not None:
            got.append(message.secret)
    assert got == secrets


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def packed(*fields: object) -> bytes:
    return framed(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        framed(b""),
        framed(b"\xc1"),
        packed(1),
        framed(msgspec.msgpack.encode({"a": 1})),
        packed("hello"),
        packed("hello:2", b"secret", 1),
        framed(Hello(b"secret", "w").encode() + b"x"),
        packed("tokens:2", [["s", 0, b"1234"]]),
        packed("tokens:2", [["s", -1, [1]]]),
        packed("tokens:2", [["s", True, [1]]]),
        packed("tokens:2", [["s", 0, [1 << 40]]]),
        packed("tokens:2", [["s", 0, [1], 3]]),
        packed("tokens:2", [["s", 0, [1], None, None, -1]]),
        framed(b"\x91" * 5000),
    ],
)
def test_what_is_no_frame_is_refused(data):
    reader = FrameReader(read_from_worker)
    reader.feed(data)
    with pytest.raises(BadMessage):
        reader.next()


@given(st.binary(max_size=200))
def test_noise_is_refused_or_waits_for_more(noise):
    reader = FrameReader(read_from_worker, limit=100)
    reader.feed(framed(noise))
    try:
        message = reader.next()
    except BadMessage:
        return
    assert message is not None and read_from_worker(message.encode()) == message


def test_a_worker_of_another_version_is_told_apart_from_noise():
    reader = FrameReader(read_from_worker)
    reader.feed(packed("hello:1", b"secret", "worker"))
    with pytest.raises(WrongVersion, match="hello of version 1 .* reads hello:2.*upgrade"):
        reader.next()


def test_frames_have_a_largest_size():
    with pytest.raises(BadMessage, match="larger"):
        frames.encode(Hello(b"x" * (frames.MAX_FRAME + 1), "worker"))


def test_an_address_does_not_print_its_secret():
    assert "secret" not in repr(InboxAddress("127.0.0.1", 1234, b"very secret"))
