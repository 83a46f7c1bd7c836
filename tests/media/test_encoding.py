"""Samples to every format, whole and in pieces: what a decoder makes of them is the sound again."""

from __future__ import annotations

import wave
from io import BytesIO

import av
import numpy as np
import pytest

from serve_app.media.encoding import CODECS, Encoder

RATE = 16_000


def tone(seconds: float = 1.0) -> np.ndarray:
    times = np.arange(int(seconds * RATE)) / RATE
    return (np.sin(2 * np.pi * 440 * times) * 12_000).astype("<i2")


def decoded(form: str, data: bytes, rate: int) -> np.ndarray:
    if form == "pcm":
        return np.frombuffer(data, "<i2")
    resampler = av.AudioResampler(format="s16", layout="mono", rate=rate)
    with av.open(BytesIO(data)) as file:
        frames = [piece for frame in file.decode(audio=0) for piece in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray().reshape(-1)[: frame.samples] for frame in frames])


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_tone_is_a_tone_again(form, streamed):
    encoder = Encoder(form, RATE, streamed=streamed)
    sound = tone()
    pieces = [encoder.feed(part.tobytes()) for part in np.array_split(sound, 7)]
    assert any(pieces) == streamed or form in ("opus", "flac", "aac")
    found = decoded(form, b"".join([*pieces, encoder.finish()]), RATE)
    assert len(found) == pytest.approx(len(sound), abs=RATE // 8)
    spectrum = np.abs(np.fft.rfft(found))
    assert spectrum.argmax() * RATE / len(found) == pytest.approx(440, abs=3)
    assert np.abs(found).max() == pytest.approx(12_000, rel=0.2)


def test_another_rate_and_the_lengths_of_headers():
    encoder = Encoder("wav", RATE, out_rate=24_000, streamed=False)
    assert encoder.feed(tone().tobytes()) == b""
    with wave.open(BytesIO(encoder.finish())) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() == pytest.approx(24_000, abs=64)
    # Opus knows few rates, and MP3 takes a bit rate.
    opus = Encoder("opus", 22_050)
    assert len(decoded("opus", opus.feed(tone().tobytes()) + opus.finish(), 16_000)) > 0
    sizes = []
    for bits in (32_000, 128_000):
        mp3 = Encoder("mp3", RATE, bit_rate=bits)
        sizes.append(len(mp3.feed(tone().tobytes()) + mp3.finish()))
    assert sizes[1] > 2 * sizes[0]
