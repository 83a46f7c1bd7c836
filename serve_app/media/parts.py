"""How many parts a picture's file has, counted before a decoder sees it: each part costs a decoder time and memory,
and nothing bounds their number but the file's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from serve_app.media.errors import BadFile

# Chunks of a PNG, segments of a JPEG, blocks of a GIF before its first frame. A PNG of 32 MiB in pieces of 8 KiB, as
# libpng writes them, has 4096.
MAX_PARTS = 50_000
# Of a progressive JPEG, each of which goes through all of its pixels; encoders write about ten.
MAX_SCANS = 32

_Part = TypeVar("_Part")

_PNG = b"\x89PNG\r\n\x1a\n"
# Markers of JPEG without a length: TEM, RST0 to RST7, SOI.
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})


def check_parts(data: bytes) -> None:
    """Raises :class:`BadFile` for too many of them. What is broken is left to the decoder."""
    if data.startswith(_PNG):
        profiles = sum(kind == b"iCCP" for kind in _bounded(_chunks(data), "PNG", "chunks"))
        if profiles > 1:
            raise BadFile(f"the PNG has {profiles} colour profiles; one is allowed. Save it anew")
    elif data.startswith(b"\xff\xd8"):
        first = max(_bounded(_segments(data), "JPEG", "segments"), default=0)
        scans = data.count(b"\xff\xda", first, _end(data, first))
        if scans > MAX_SCANS:
            raise BadFile(f"the JPEG has {scans} scans; at most {MAX_SCANS} are taken. Save it anew")
    elif data.startswith(b"GIF8"):
        for _ in _bounded(_blocks(data), "GIF", "blocks before its first frame"):
            pass


def _bounded(parts: Iterator[_Part], kind: str, noun: str) -> Iterator[_Part]:
    for count, part in enumerate(parts):
        if count == MAX_PARTS:
            raise BadFile(f"the {kind} has more than {MAX_PARTS} {noun}. Save it anew")
        yield part


def _chunks(data: bytes) -> Iterator[bytes]:
    """The kind of each: length, kind, body, checksum."""
    at = len(_PNG)
    while at + 8 <= len(data):
        yield data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _segments(data: bytes) -> Iterator[int]:
    """Where each begins, up to that of the first scan."""
    at = 2
    while 0 <= (at := data.find(b"\xff", at)) < len(data) - 3:
        yield at
        kind = data[at + 1]
        if kind == 0xDA:
            return
        # Bytes of 0xff before a marker fill up.
        at += 1 if kind == 0xFF else 2 if kind in _ALONE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _end(data: bytes, first: int) -> int:
    """Where the picture ends; another may lie behind it. Within a scan 0xff is followed by 0 or a restart."""
    end = data.find(b"\xff\xd9", first)
    return len(data) if end < 0 else end


def _blocks(data: bytes) -> Iterator[int]:
    """Where each block of an extension begins, up to the first frame."""
    if len(data) < 13:
        return
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    while at + 2 < len(data) and data[at] == 0x21:
        at += 2
        while at < len(data):
            yield at
            size = data[at]
            at += 1 + size
            if not size:
                break
