"""Sound to samples: one channel of 16-bit numbers at 16 kHz, written piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from serve_app.media import allowance
from serve_app.media.errors import BadFile
from serve_app.media.limits import MAX_SECONDS, SAMPLE_RATE, longest_s

# Samples per second, and channels, of files: telephones have 8000, studios 192,000 and up to 16.
RATES = (1000, 768_000)
MAX_CHANNELS = 32
TAKEN = "WAV, FLAC, MP3, Ogg, M4A or WebM"


def container(data: bytes) -> str | None:
    """FFmpeg's name of the format, by the first bytes; None: none that is taken.

    FFmpeg itself is not asked: some of its formats (playlists) name other files, which it would open.
    """
    head = data[:16]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mov"
    signs = {b"fLaC": "flac", b"OggS": "ogg", b"\x1a\x45\xdf\xa3": "matroska", b"ID3": "mp3"}
    for sign, name in signs.items():
        if head.startswith(sign):
            return name
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        # A layer of 0 is that of ADTS.
        return "aac" if head[1] & 0x06 == 0 else "mp3"
    return None


def decode_audio(data: bytes, seconds: float | None = None) -> Iterator[bytes]:
    """Little-endian int16 of one channel at `SAMPLE_RATE`, in pieces; of a sound that has no more than ``seconds``.
    Raises :class:`BadFile`.
    """
    # Here, since pictures need no FFmpeg.
    import av
    from av.audio.resampler import AudioResampler

    name = container(data)
    if name is None:
        raise BadFile(f"it is no sound file that is known. Send {TAKEN}")
    samples, most = 0, longest_s(len(data))
    asked = most if seconds is None else min(seconds, most)
    try:
        with av.open(BytesIO(data), format=name, options={"protocol_whitelist": "none"}) as file:
            if not file.streams.audio:
                raise BadFile("the file has no sound")
            stream = file.streams.audio[0]
            _check(stream.codec_context)
            if seconds is not None and _says(name, stream) > asked + 1:
                raise BadFile(_too_long(asked, most))
            resampler = AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
            for frame in _frames(file, stream):
                allowance.more(allowance.SOUND_S * (frame.samples / frame.sample_rate if frame else 0))
                for piece in resampler.resample(frame):
                    samples += piece.samples
                    if samples > asked * SAMPLE_RATE:
                        raise BadFile(_too_long(asked, most))
                    # FFmpeg pads planes.
                    yield bytes(piece.planes[0])[: 2 * piece.samples]
    except BadFile:
        raise
    except MemoryError:
        raise BadFile("the sound takes too much memory to decode") from None
    except Exception as error:  # FFmpeg's errors have types of their own
        raise BadFile(f"it is no sound that can be read ({type(error).__name__}). Send {TAKEN}, whole") from None
    if not samples:
        raise BadFile("the file has no sound")


def _says(name: str, stream: Any) -> float:
    """Seconds that the file says it has, so that much of a long one need not be decoded; 0 where that may be wrong: a
    WAV that was written into a pipe. FFmpeg guesses of an MP3 by what its beginning takes."""
    if stream.duration is None or name not in ("flac", "mov", "ogg", "matroska", "mp3"):
        return 0.0
    return float(stream.duration * stream.time_base) / (3 if name == "mp3" else 1)


def _too_long(asked: float, most: int) -> str:
    if asked < most or most == MAX_SECONDS:
        return f"the sound is longer than {asked:g} seconds; send it in parts"
    return f"the sound is longer than the {most} seconds that a file of its size may hold; send it as WAV or MP3"


def _check(sound: Any) -> None:
    """Raises :class:`BadFile` for what no recording has; the resampler would work on it for long, or not at all."""
    # 0 is what nothing was found of; FFmpeg refuses that itself.
    if sound.sample_rate and not RATES[0] <= sound.sample_rate <= RATES[1]:
        raise BadFile(f"the sound has {sound.sample_rate} samples a second; {RATES[0]} to {RATES[1]} are taken")
    if sound.layout.nb_channels > MAX_CHANNELS:
        raise BadFile(f"the sound has {sound.layout.nb_channels} channels; at most {MAX_CHANNELS} are taken. Mix them")


def _check_numbers(frame: Any) -> None:
    """Of a file of floating-point numbers. Raises :class:`BadFile` for one that is infinite or none (NaN)."""
    double = frame.format.name.startswith("dbl")
    for plane in frame.planes:
        view = memoryview(plane).cast("B")
        if not math.isfinite(sum(view.cast("d") if double else view.cast("f"))):
            raise BadFile("the sound has samples that are infinite or no numbers; write it anew, from -1 to 1")


def _frames(file: Any, stream: Any) -> Iterator[Any]:
    """The frames, and None at the end, which has the resampler give what it holds back."""
    numbers = stream.codec_context.name.startswith("pcm_f")
    for frame in file.decode(stream):
        if numbers:
            _check_numbers(frame)
        yield frame
    yield None
