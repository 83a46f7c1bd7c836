"""Sentences spoken by espeak-ng, which must be on the path (Debian: ``apt install espeak-ng``)."""

from __future__ import annotations

import subprocess
import wave
from dataclasses import dataclass
from io import BytesIO
from random import Random

import av
import numpy as np
import numpy.typing as npt

RATE = 16_000
# Languages as espeak-ng calls them, its voices, and those that are heard in the score alone.
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp")
VOICES = (
    "",
    "+m1",
    "+m2",
    "+m3",
    "+m4",
    "+m5",
    "+m6",
    "+f1",
    "+f2",
    "+f3",
    "+Andy",
    "+Annie",
    "+linda",
    "+john",
    "+max",
)
UNHEARD = ("+m7", "+f4", "+steph")
Samples = npt.NDArray[np.int16]


@dataclass(slots=True, frozen=True)
class Voice:
    """``speed``: words a minute; ``pitch``: 0 to 99."""

    name: str
    speed: int
    pitch: int


def voice(rng: Random, *, unheard: bool = False) -> Voice:
    return Voice(
        rng.choice(ACCENTS) + rng.choice(UNHEARD if unheard else VOICES), rng.randrange(130, 190), rng.randrange(25, 75)
    )


def speak(text: str, by: Voice) -> Samples:
    """At 16 kHz, without the silence around it."""
    command = ["espeak-ng", "--stdout", "-v", by.name, "-s", str(by.speed), "-p", str(by.pitch), text]
    with wave.open(BytesIO(_riff(subprocess.run(command, check=True, capture_output=True).stdout))) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        found = resampled(raw, file.getframerate())
    loud = np.flatnonzero(np.abs(found) > 150)
    return found[loud[0] : loud[-1] + 1].astype(np.int16)


def resampled(raw: Samples, rate: int) -> Samples:
    """At 16 kHz."""
    frame = av.AudioFrame.from_ndarray(raw[None], format="s16", layout="mono")
    frame.sample_rate = rate
    change = av.AudioResampler("s16", "mono", RATE)
    return np.concatenate([part.to_ndarray()[0] for part in (*change.resample(frame), *change.resample(None))])


def _riff(data: bytes) -> bytes:
    """With the length that a program can't know which writes into a pipe."""
    at = data.index(b"data") + 4
    return data[:at] + (len(data) - at - 4).to_bytes(4, "little") + data[at + 4 :]
