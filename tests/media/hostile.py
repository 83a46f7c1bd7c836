"""Small files that take a decoder long, or much memory, or make numbers that no model can compute with."""

from __future__ import annotations

import struct
import zlib
from functools import cache
from io import BytesIO

import numpy as np
from PIL import Image

from serve_app.media.encoding import Encoder
from serve_app.media.limits import SAMPLE_RATE
from tests.media.files import picture

# More than any decoder is given; walked through in milliseconds.
MANY = 200_000


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(*chunks: bytes) -> bytes:
    """A good PNG with more chunks behind its header."""
    good = picture()
    return good[:33] + b"".join(chunks) + good[33:]


def scans(width: int, height: int, more: int) -> bytes:
    """A progressive JPEG whose last scan comes ``more`` times again."""
    out = BytesIO()
    Image.new("RGB", (width, height), (90, 20, 160)).save(out, "JPEG", progressive=True)
    good = out.getvalue()
    return good[:-2] + good[good.rfind(b"\xff\xda") : -2] * more + good[-2:]


def frames(kind: str, count: int) -> bytes:
    out = BytesIO()
    first, *rest = (Image.new("RGB", (16, 16), (i % 256, i // 256, 0)) for i in range(count))
    first.save(out, kind, save_all=True, append_images=rest, duration=10)
    return out.getvalue()


def wav(data: bytes, channels: int = 1, rate: int = 16_000, bits: int = 8, form: int = 1) -> bytes:
    step = channels * bits // 8
    says = struct.pack("<HHIIHH", form, channels, rate, rate * step & 0xFFFFFFFF, step & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(says)) + says + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def numbers(*values: float, kind: type = np.float32) -> bytes:
    """A second of them, over and over."""
    found = np.resize(np.asarray(values, kind), 16_000)
    return wav(found.tobytes(), bits=8 * found.itemsize, form=3)


def film() -> bytes:
    """A film without sound."""
    import av

    out = BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(5):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


def cut(kind: str) -> bytes:
    encoder = Encoder(kind, SAMPLE_RATE, streamed=False)
    noise = np.random.default_rng(5).integers(-9000, 9000, 3 * SAMPLE_RATE).astype(np.int16)
    whole = encoder.feed(noise.tobytes()) + encoder.finish()
    return whole[: len(whole) // 2]


@cache
def hostile_pictures() -> dict[str, bytes]:
    bomb = zlib.compress(b"\0" * 100_000_000, 9)
    small = zlib.compress(b"\0" * 1_000_000, 9)
    jpeg, gif = picture(kind="JPEG"), picture(kind="GIF")
    table = 13 + (3 << ((gif[10] & 7) + 1))
    tags = b"".join(struct.pack("<HHII", 20_000 + i, 1, 900_000, 8) for i in range(2000))
    return {
        "PNG with a text that unpacks to 100 MB": png_with(chunk(b"zTXt", b"a\0\0" + bomb)),
        "PNG with a profile that unpacks to 100 MB": png_with(chunk(b"iCCP", b"a\0\0" + bomb)),
        "PNG with 100 texts of 1 MB": png_with(*[chunk(b"zTXt", b"a\0\0" + small)] * 100),
        "PNG with 900 profiles": png_with(*[chunk(b"iCCP", b"a\0\0" + small)] * 900),
        "PNG of many chunks": png_with(*[chunk(b"teSt")] * MANY),
        "PNG of many pieces of data": png_with(*[chunk(b"IDAT")] * MANY),
        "PNG of many chunks behind its data": picture()[:-12] + chunk(b"teSt") * MANY + chunk(b"IEND"),
        "JPEG of many scans": scans(64, 64, 5000),
        "JPEG of 64 megapixels and many scans": scans(8000, 8000, 300),
        "JPEG of many segments": jpeg[:2] + b"\xff\xe1\0\x02" * MANY + jpeg[2:],
        "GIF of many comments": gif[:table] + b"\x21\xfe\x01x\0" * MANY + gif[table:],
        "TIFF whose tags are all of its bytes": b"II*\0\x08\0\0\0" + struct.pack("<H", 2000) + tags + bytes(1_000_000),
        "BMP that says it is large": picture(kind="BMP")[:18] + struct.pack("<ii", 8000, 8000)
        + picture(kind="BMP")[26:],
        "WebP that says it is large": picture(kind="WEBP")[:26] + b"\xff\x3f\xff\x3f" + picture(kind="WEBP")[30:],
    }  # fmt: skip


@cache
def hostile_sounds() -> dict[str, bytes]:
    return {
        "WAV of 30,000 channels": wav(bytes(300_000), 30_000),
        "WAV of 64 channels": wav(bytes(300_000), 64),
        "WAV of 31 MB at a sample a second": wav(bytes(31 << 20), rate=1),
        "WAV of 2 GHz": wav(bytes(1 << 20), rate=2_000_000_000),
        "WAV of NaN": numbers(float("nan")),
        "WAV with a NaN here and there": numbers(*[0.1] * 999, float("nan")),
        "WAV of infinite numbers": numbers(float("inf"), float("-inf")),
        "WAV of infinite doubles": numbers(float("inf"), 0.0, kind=np.float64),
        "a film without sound": film(),
        "FLAC cut in half": cut("flac")[:4000],
        "MP3 whose tag says it is long": b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + cut("mp3"),
    }
