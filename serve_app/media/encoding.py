"""Samples of our own to the formats that clients ask for, piece by piece; PyAV has all of them."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np

# By format: FFmpeg's container and codec.
CODECS = {
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "aac": ("adts", "aac"),
    "flac": ("flac", "flac"),
    "wav": ("wav", "pcm_s16le"),
    "pcm": ("s16le", "pcm_s16le"),
}
# Of opus: other rates are brought to the last.
OPUS_RATES = (8000, 12_000, 16_000, 24_000, 48_000)


class _Pipe:
    """A file that can be written alone, so that no header is written twice."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


class Encoder:
    """One channel of int16 at ``rate`` a second, to ``form``. ``out_rate``: of the answer, by default the same;
    ``bit_rate``: bits a second, of formats that lose some. ``streamed``: each piece goes as it is ready; otherwise all
    comes from :meth:`finish`, with lengths in headers.
    """

    def __init__(
        self, form: str, rate: int, *, out_rate: int | None = None, bit_rate: int | None = None, streamed: bool = True
    ) -> None:
        # Here, since few gateways speak.
        import av

        self._av = av
        self._rate, self._at = rate, 0
        container, codec = CODECS[form]
        out = out_rate or rate
        if form == "opus" and out not in OPUS_RATES:
            out = OPUS_RATES[-1]
        self._file: Any = _Pipe() if streamed else BytesIO()
        # What is told of a stream's length at its beginning is not known yet.
        options = {"write_xing": "0"} if streamed and form == "mp3" else {}
        self._container = av.open(self._file, "w", format=container, options=options)
        self._stream: Any = self._container.add_stream(codec, rate=out)
        self._stream.layout = "mono"
        if bit_rate is not None and form in ("mp3", "opus", "aac"):
            self._stream.bit_rate = bit_rate
        self._streamed = streamed

    def feed(self, samples: bytes) -> bytes:
        """Little-endian int16; what is ready of the answer."""
        if samples:
            values = np.frombuffer(samples, "<i2").reshape(1, -1)
            frame = self._av.AudioFrame.from_ndarray(values, format="s16", layout="mono")
            frame.sample_rate, frame.pts = self._rate, self._at
            self._at += values.shape[1]
            self._container.mux(self._stream.encode(frame))
        return self._ready()

    def finish(self) -> bytes:
        """The rest. Nothing can be done with it afterwards."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        if not self._streamed:
            found: bytes = self._file.getvalue()
            return found
        return self._ready()

    def _ready(self) -> bytes:
        if not self._streamed:
            return b""
        found = bytes(self._file.data)
        self._file.data.clear()
        return found
