"""Readers of bytes, each with right inputs to begin with, for a fuzzer that changes bytes by what they reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.fuzz import adapters, bodies, files, stored
from serve_app.api.multipart import BodyPart, write_multipart
from serve_app.channel import frames

BOUNDARY = "multipart/form-data; boundary=x"


@dataclass(slots=True, frozen=True)
class Bytes:
    """``read`` must not raise; ``right``: inputs that it takes."""

    read: Callable[[bytes], None]
    right: tuple[bytes, ...]


def _body(name: str) -> Bytes:
    return Bytes(lambda data: bodies.read(name, data), (json.dumps(bodies.READERS[name][0]).encode(),))


def _message(name: str) -> Bytes:
    return Bytes(lambda data: stored.read_message(name, data), tuple(sample.encode() for sample in stored.SAMPLES))


def _document(extension: str, right: bytes) -> Bytes:
    return Bytes(lambda data: files.read_document(data, extension), (right,))


def _parts() -> bytes:
    data, kind = write_multipart([BodyPart("a", b"text"), BodyPart("b", b"\0\1", "image/png", "b.png")])
    return data.replace(kind.rpartition("=")[2].strip('"').encode(), b"x")


def readers() -> dict[str, Bytes]:
    sent = b"".join(frames.encode(sample) for sample in stored.SAMPLES)
    return {
        **{f"body {name}": _body(name) for name in bodies.READERS},
        **{f"message {name}": _message(name) for name in stored.READERS},
        "multipart": Bytes(lambda data: bodies.read_parts(data, BOUNDARY), (_parts(),)),
        "frames": Bytes(lambda data: stored.read_stream(data, [1, 3, 7, 50, 200]), (sent,)),
        "chunk file": Bytes(stored.read_chunk, (stored.chunk_file(),)),
        "journal": Bytes(stored.read_journal, (stored.journal_file(),)),
        "adapter weights": Bytes(lambda data: adapters.read_files(adapters.TEXT, data), (adapters.RIGHT,)),
        **{f"document {extension}": _document(extension, right) for extension, right in files.documents().items()},
        "adapter config": Bytes(lambda data: adapters.read_files(data, adapters.RIGHT), (adapters.TEXT,)),
    }
