from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel import frames
from serve_app.channel.frames import BadFrame, FrameReader, InboxAddress, TokenItem

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(tuple)


@given(st.text(max_size=9), st.integers(0, 2**40), IDS, st.sampled_from([None, "stop"]), st.booleans())
def test_items_survive_the_wire(stream, offset, ids, finish, with_extra):
    item = TokenItem(stream, offset, ids, finish, [[-0.5, i] for i in range(len(ids))] if with_extra else None)
    reader = FrameReader()
    reader.feed(frames.encode(frames.TOKENS, [item.to_wire()]))
    kind, fields = reader.next()
    assert kind == frames.TOKENS
    assert TokenItem.from_wire(fields[0][0]) == item


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 20))
def test_frames_are_cut_wherever_the_network_cuts_them(bodies, step):
    stream = b"".join(frames.encode(frames.HELLO, body) for body in bodies)
    reader, got = FrameReader(), []
    for at in range(0, len(stream), step):
        reader.feed(stream[at : at + step])
        while (frame := reader.next()) is not None:
            got.append(frame[1][0])
    assert got == bodies


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        framed(b""),
        framed(b"\xc1"),
        framed(msgpack.packb([1])),
        framed(msgpack.packb({"a": 1})),
        framed(msgpack.packb([2, 1])),
        framed(msgpack.packb([1, "x"])),
        framed(msgpack.packb([1, True])),
        framed(msgpack.packb([1, 1]) + b"x"),
        framed(msgpack.packb([1, 1, msgpack.ExtType(4, b"abc")])),
        framed(b"\x91" * 5000),
    ],
)
def test_what_is_no_frame_is_refused(data):
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(BadFrame):
        reader.next()


@given(st.binary(max_size=200))
def test_noise_is_refused_or_waits_for_more(noise):
    reader = FrameReader(limit=100)
    reader.feed(framed(noise))
    try:
        frame = reader.next()
    except BadFrame:
        return
    assert frame is not None and msgpack.unpackb(noise)[:2] == [1, frame[0]]


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [],
        ["s", 0, b"", None],
        [1, 0, b"", None, None],
        ["s", -1, b"", None, None],
        ["s", True, b"", None, None],
        ["s", 0, "ids", None, None],
        ["s", 0, b"123", None, None],
        ["s", 0, b"", 3, None],
        ["s", 0, b"1234", None, []],
        ["s", 0, b"1234", None, {"a": 1}],
    ],
)
def test_bad_items_are_refused(wire):
    with pytest.raises(BadFrame):
        TokenItem.from_wire(wire)


def test_frames_have_a_largest_size():
    with pytest.raises(BadFrame, match="larger"):
        frames.encode(frames.TOKENS, b"x" * (frames.MAX_FRAME + 1))


def test_an_address_travels_and_does_not_print_its_secret():
    address = InboxAddress("127.0.0.1", 1234, b"very secret")
    assert InboxAddress.from_wire(address.to_wire()) == address
    assert "secret" not in repr(address)
