"""Files for tests, good and bad, made here."""

from __future__ import annotations

import struct
import wave
import zlib
from functools import cache
from io import BytesIO

import numpy as np
from PIL import Image


def picture(width: int = 40, height: int = 30, kind: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    """A picture of noise, always the same."""
    rng = np.random.default_rng(7)
    found = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)
    out = BytesIO()
    found.save(out, kind, **options)
    return out.getvalue()


def sound(seconds: float = 1.0, rate: int = 16_000, channels: int = 1, pitch: float = 440.0) -> bytes:
    """A WAV of a tone."""
    times = np.arange(int(seconds * rate)) / rate
    samples = (np.sin(2 * np.pi * pitch * times) * 8000).astype(np.int16)
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples, channels).tobytes())
    return out.getvalue()


def png(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    """A PNG whose header says what it is told, whatever lies behind."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data or zlib.compress(b"")) + chunk(b"IEND", b"")


@cache
def bad_pictures() -> dict[str, bytes]:
    """Files that are no pictures, or not whole, or lie about themselves."""
    good = {kind: picture(kind=kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    cut = {f"{kind} cut in half": data[: len(data) // 2] for kind, data in good.items()}
    heads = {f"{kind} of 20 bytes": data[:20] for kind, data in good.items()}
    wrong = {f"{kind} with a wrong middle": data[:30] + b"\0" * (len(data) - 30) for kind, data in good.items()}
    bomb = zlib.compress(b"\0" * 50_000_000, 9)
    return {
        **cut,
        **heads,
        **{name: data for name, data in wrong.items() if not name.startswith(("BMP", "GIF", "WEBP"))},
        "text": b"this is no picture",
        "one byte": b"\x89",
        "HTML": b"<!doctype html><html><body>404</body></html>",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>',
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        "PDF": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>",
        "ZIP": b"PK\x03\x04" + b"\0" * 100,
        "pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93.",
        "sound": sound(0.1),
        "PNG of 60000 by 60000": png(60_000, 60_000, bomb),
        "PNG of 2 ** 31 - 1": png(2**31 - 1, 2**31 - 1),
        "PNG of no pixels": png(0, 0),
        "PNG that is wide": png(1_000_000, 4),
        "PNG of a line": picture(1, 300),
        "PNG without data": png(100, 100),
        "PNG of depth 99": png(10, 10, depth=99),
        "PNG of 8000 by 8000 with nothing in it": png(8000, 8000, zlib.compress(b"\0" * 100)),
        "GIF of 65535 by 65535": b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\0\0\0\0\xff\xff\xff\xff\0\x08\x00;",
        "BMP of a billion pixels": b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 40000, 40000, 1, 24, 0, 0, 0, 0, 0, 0),
        "TIFF that points to itself": b"II*\0\x08\0\0\0\xff\xff" + b"\0" * 40,
        "zeros": bytes(10_000),
        "noise": np.random.default_rng(1).bytes(10_000),
    }  # fmt: skip


@cache
def bad_sounds() -> dict[str, bytes]:
    """Files that are no sound, or lie about themselves."""
    good = sound(0.5)
    huge = good[:4] + b"\xff\xff\xff\xff" + good[8:40] + b"\xff\xff\xff\xff"
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    return {
        "text": b"this is no sound",
        "one byte": b"R",
        "a head alone": good[:12],
        "WAV without data": good[:44],
        "WAV that says it is long, and is not": huge,
        "WAV of no channels": good[:22] + b"\0\0" + good[24:],
        "WAV of 0 Hz": good[:24] + b"\0\0\0\0" + good[28:],
        "WAV of an unknown codec": good[:20] + b"\xee\xee" + good[22:],
        "playlist": playlist,
        "playlist of files": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        "session description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nm=audio 9 RTP/AVP 0\n",
        "FLAC head": b"fLaC" + b"\0" * 60,
        "Ogg head": b"OggS" + b"\0" * 60,
        "Matroska head": b"\x1a\x45\xdf\xa3" + b"\xff" * 60,
        "MP4 head": b"\0\0\0\x18ftypM4A \0\0\0\0" + b"\0" * 60,
        "MP3 frames of noise": b"\xff\xfb\x90\0" + np.random.default_rng(2).bytes(100),
        "ID3 without sound": b"ID3\x04\0\0\0\0\0\x0a" + b"\0" * 10,
        "picture": picture(),
        "ZIP": b"PK\x03\x04" + b"\0" * 100,
        "zeros": bytes(10_000),
        "noise": np.random.default_rng(3).bytes(10_000),
        "empty Ogg pages": (b"OggS\0\x02" + b"\0" * 21) * 10,
    }
