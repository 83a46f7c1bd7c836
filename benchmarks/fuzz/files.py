"""Files of clients: pictures and sounds by the process that decodes them, and documents by what converts them."""

from __future__ import annotations

import atexit
import functools
import io
import time
import zipfile
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from benchmarks.fuzz.stored import damaged
from serve_app.documents.formats import FORMATS
from serve_app.documents.program import Refused, convert
from serve_app.media.decoder import Decoder
from serve_app.media.encoding import Encoder
from serve_app.media.errors import BadFile
from serve_app.media.limits import AUDIO_S, IMAGE_S, MAX_PIXELS, SAMPLE_RATE, longest_s

PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
SOUNDS = ("wav", "flac", "mp3", "opus")
# Beyond what a file may take: the process's start, and a machine that is busy.
MORE_S = 30.0


@functools.cache
def pictures() -> tuple[bytes, ...]:
    """One picture in each format."""
    from PIL import Image

    pixels = np.random.default_rng(3).integers(0, 256, (24, 40, 3), np.uint8)
    found = []
    for kind in PICTURES:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind)
        found.append(out.getvalue())
    return tuple(found)


@functools.cache
def sounds() -> tuple[bytes, ...]:
    """One sound in each format: a fifth of a second."""
    wave = (9000 * np.sin(np.arange(SAMPLE_RATE // 5) * 0.2)).astype("<i2").tobytes()
    found = []
    for kind in SOUNDS:
        encoder = Encoder(kind, SAMPLE_RATE, streamed=False)
        found.append(encoder.feed(wave) + encoder.finish())
    return tuple(found)


def documents() -> dict[str, bytes]:
    """By extension."""
    body = b"<w:p><w:r><w:t>one</w:t></w:r></w:p>"
    word = b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>%s</w:body>'
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("word/document.xml", word % body + b"</w:document>")
    table = b"<table><tr><td>a</td><td>b</td></tr></table>"
    return {
        ".html": b"<html><body><h1>one</h1>" + table + b"<script>x</script></body></html>",
        ".csv": b'a,b\n1,"two, three"\n',
        ".json": b'{"a": [1, 2]}',
        ".docx": out.getvalue(),
    }


@functools.cache
def decoder() -> Decoder:
    found = Decoder()
    atexit.register(found.close)
    return found


def _in_time(seconds: float, decode: Callable[[bytes], None], data: bytes) -> None:
    since = time.monotonic()
    try:
        decode(data)
    except BadFile as refused:
        assert str(refused)
    took = time.monotonic() - since
    assert took < seconds + MORE_S, f"it took {took:.0f} s"


def read_picture(data: bytes) -> None:
    """Refused as :class:`BadFile`, or pixels as many as its size says; in time."""

    def decode(data: bytes) -> None:
        width, height = decoder().size(data)
        pixels = decoder().image(data)
        assert pixels.shape == (height, width, 3) and 0 < width * height <= MAX_PIXELS

    _in_time(2 * IMAGE_S, decode, data)


def read_sound(data: bytes) -> None:
    """Refused as :class:`BadFile`, or samples as many as are told, and no more than its size may hold; in time."""

    def decode(data: bytes) -> None:
        most = longest_s(len(data))
        count = decoder().length(data, most)
        assert len(decoder().sound(data).samples) == count <= most * SAMPLE_RATE

    _in_time(2 * AUDIO_S, decode, data)


def read_document(data: bytes, extension: str) -> None:
    """Refused as :class:`Refused`, or text."""
    known = next(known for known in FORMATS if known.extension == extension)
    try:
        assert isinstance(convert(data, known), str)
    except Refused as refused:
        assert str(refused)


def changed(right: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Right files that were damaged, or cut off."""
    cut = st.tuples(st.sampled_from(right), st.floats(0, 1)).map(lambda pair: pair[0][: int(len(pair[0]) * pair[1])])
    return st.one_of(st.sampled_from(right).flatmap(damaged), cut)
