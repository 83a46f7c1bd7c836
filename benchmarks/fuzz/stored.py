"""What is read back from files and from other processes: frames, chunks, journals, records. Some of it is damaged."""

from __future__ import annotations

import contextlib
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from hypothesis import strategies as st

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import PROJECT_ROOT, load_record
from serve_app.channel import frames
from serve_app.channel.frames import FrameReader
from serve_app.channel.inbox import ChannelGap, Stream, TokenInbox
from serve_app.config import ConfigError, load_settings
from serve_app.kv.chunk import BadChunk, ChunkMeta, Layout
from serve_app.kv.disk import HEADER_BYTES, MAGIC, DiskTier
from serve_app.state.journal import Journal
from serve_app.state.protocols import Row
from serve_app.wire.encode import read_encode_result
from serve_app.wire.generate import read_generate_call, read_generate_result
from serve_app.wire.message import BadMessage, Message, MessageDecoder
from serve_app.wire.tokens import Ack, Acked, Closed, Hello, TokenItem, Tokens, read_from_gateway, read_from_worker

READERS: dict[str, MessageDecoder[Any]] = {
    "worker": read_from_worker,
    "gateway": read_from_gateway,
    "generate call": read_generate_call,
    "generate result": read_generate_result,
    "encode result": read_encode_result,
}
SAMPLES: list[Message] = [
    Hello(b"secret", "worker"),
    Tokens((TokenItem("s", 3, (1, 2, 3), "stop", None, 4), TokenItem("t", 0, ()))),
    Ack((Acked("s", 3, True),)),
    Closed(("s", "t")),
]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
TAGS = st.sampled_from(
    [sample.tag() for sample in SAMPLES] + ["load:2", "generate:2", "generated:2", "failed:1", "x:9"]
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with up to five pieces replaced, left out or put in."""
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=6)) + data[at + draw(st.integers(0, 6)) :]
    return data


def message_bytes() -> st.SearchStrategy[bytes]:
    """Messages that were damaged, and arrays with a message's tag and anything behind it."""
    told = st.sampled_from([sample.encode() for sample in SAMPLES]).flatmap(damaged)
    made = st.builds(lambda tag, rest: msgspec.msgpack.encode([tag, *rest]), TAGS, st.lists(PLAIN, max_size=6))
    return st.one_of(told, made, st.binary(max_size=60))


def read_message(name: str, data: bytes) -> None:
    """Refused as :class:`BadMessage`, or a message that survives another round."""
    try:
        message = READERS[name](data)
    except BadMessage:
        return
    again = message.encode()
    assert READERS[name](again).encode() == again


def read_stream(data: bytes, cuts: list[int]) -> None:
    """A byte stream in pieces: what comes out does not depend on where it was cut."""
    whole, pieces = _messages(data, [len(data)]), _messages(data, cuts)
    assert whole == pieces


def _messages(data: bytes, cuts: list[int]) -> list[Any]:
    reader, found = FrameReader(read_from_worker, limit=1000), []
    ends = sorted({*(cut % (len(data) + 1) for cut in cuts), len(data)})
    for begin, end in zip([0, *ends], ends, strict=False):
        reader.feed(data[begin:end])
        try:
            while (message := reader.next()) is not None:
                found.append(message.encode())
        except BadMessage:
            return [*found, "refused"]
    return found


@st.composite
def byte_streams(draw: st.DrawFn) -> bytes:
    whole = b"".join(frames.encode(sample) for sample in draw(st.lists(st.sampled_from(SAMPLES), max_size=4)))
    return draw(st.one_of(st.just(whole), damaged(whole)))


PIECES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.booleans()), max_size=12)


def join_pieces(pieces: list[tuple[int, int, bool]]) -> None:
    """Tokens of one stream come in pieces that overlap, repeat or leave something out: what is shown is the truth's
    beginning, each token once, or the stream says that something is missing.
    """
    truth = tuple(range(100, 112))
    stream = Stream(TokenInbox(), "s", 0)
    for begin, size, last in pieces:
        end = min(begin + size, len(truth))
        finish = "stop" if last and end == len(truth) else None
        stream.feed(TokenItem("s", begin, truth[begin:end], finish))
    shown = tuple(token for item in stream._items for token in item.ids)
    assert shown == truth[: len(shown)], pieces
    assert not stream.finished or shown == truth, pieces
    assert stream._error is None or isinstance(stream._error, ChannelGap)


LAYOUT = Layout("L1.H1.D8.B32.float32", 64)


def _chunk(seed: int) -> ChunkMeta:
    key = bytes([seed]) * 32
    return ChunkMeta.make(root=key, start_token=0, n_tokens=32, block_keys=[key], tail_key=None, layout=LAYOUT)


def chunk_file() -> bytes:
    """A right file of the pool's second tier."""
    with tempfile.TemporaryDirectory() as folder:
        tier = DiskTier(Path(folder), 1 << 20)
        tier.write(_chunk(1), np.arange(64, dtype=np.uint8))
        data = tier.path(_chunk(1).chunk_id).read_bytes()
        tier.close()
    return data


@st.composite
def chunk_files(draw: st.DrawFn) -> bytes:
    """Damaged files, and files with anything for metadata whose checksum is right."""
    data = chunk_file()
    if draw(st.booleans()):
        head = draw(damaged(data[:600]))
        return draw(st.sampled_from([head, head.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES] + data[HEADER_BYTES:]]))
    text = draw(st.one_of(PLAIN.map(_json), damaged(data[16 : 16 + int.from_bytes(data[8:12], "little")])))
    crc = zlib.crc32(text).to_bytes(4, "little")
    return (MAGIC + len(text).to_bytes(4, "little") + crc + text).ljust(HEADER_BYTES, b"\0") + data[HEADER_BYTES:]


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def read_chunk(data: bytes) -> None:
    """A miss, or the very bytes that were written; a start sorts such a file out and goes on."""
    with tempfile.TemporaryDirectory() as folder:
        tier = DiskTier(Path(folder), 1 << 20)
        path = tier.path(_chunk(1).chunk_id)
        path.parent.mkdir()
        path.write_bytes(data)
        with contextlib.suppress(BadChunk):
            assert tier.read(_chunk(1)).tobytes() == bytes(range(64))
        for meta in tier.scan():
            assert meta.nbytes == 64 * meta.n_blocks and tier.path(meta.chunk_id) == path
            tier.recover(meta)
        tier.close()


ROWS = [Row("trace", ("a", str(n)), {"body": b"x", "at": 1.5, "none": None}, 10) for n in range(3)]
_HEAD = struct.Struct("<II")


def journal_file() -> bytes:
    """A right one."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        journal.append(ROWS)
        data = next(Path(folder).glob("*.journal")).read_bytes()
        journal.close()
    return data


@st.composite
def journals(draw: st.DrawFn) -> bytes:
    """Right records, damaged ones, and records of anything whose checksum is right."""
    data = journal_file()
    body = msgspec.msgpack.encode(draw(PLAIN))
    other = _HEAD.pack(len(body), zlib.crc32(body)) + body
    return draw(
        st.sampled_from([data, data + other, other + data]).flatmap(lambda d: st.one_of(st.just(d), damaged(d)))
    )


def read_journal(data: bytes) -> None:
    """What another process left is taken over as far as it can be read, and never stops the one that finds it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "1-dead.journal").write_bytes(data)
        journal = Journal(Path(folder))
        with journal.orphan() as rows:
            assert all(isinstance(row, Row) and isinstance(row.columns, dict) for row in rows)
        journal.close()
        assert not list(Path(folder).glob("*.journal"))


RECORD = yaml.safe_load((PROJECT_ROOT / "serve_app/catalog/models/pico-instruct.yaml").read_text())
SETTINGS = {
    "port": 8001,
    "models": [RECORD["id"]],
    "rate_limits": {"reranking": 5},
    "kv_disk_bytes": "1GiB",
    "files": "x",
}


def read_record(text: bytes) -> None:
    """A model's record: refused with the file and the reason, or a record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.yaml"
        path.write_bytes(text)
        with contextlib.suppress(CatalogError):
            assert load_record(path).id


def read_settings(text: bytes) -> None:
    """The operator's settings likewise."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_bytes(text)
        with contextlib.suppress(ConfigError):
            assert load_settings({"SERVE_APP_HOME": folder}).port
