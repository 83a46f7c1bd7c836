"""Files that were made to take long or much: refused within bounds of time and memory, and nobody else notices."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from serve_app.media.decoder import Decoder
from serve_app.media.errors import BadFile
from serve_app.media.parts import MAX_PARTS, MAX_SCANS
from tests.media.files import picture, sound
from tests.media.hostile import chunk, cut, frames, hostile_pictures, hostile_sounds, numbers, png_with, scans, wav

MOST_MB = 250


@pytest.fixture(scope="module")
def decoder():
    found = Decoder()
    found.image(picture())
    found.sound(sound(0.1))
    yield found
    found.close()


def idle(decoder: Decoder):
    """The process that the next file gets."""
    process = decoder._idle.get()
    decoder._idle.put(process)
    return process


def peak_mb(decoder: Decoder) -> int:
    """Of the process, since it began."""
    lines = Path(f"/proc/{idle(decoder)._process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


@pytest.mark.parametrize("name", hostile_pictures())
def test_pictures(decoder, name):
    before = idle(decoder)
    with pytest.raises(BadFile) as refused:
        decoder.image(hostile_pictures()[name])
    assert len(str(refused.value)) > 20
    assert decoder.image(picture()).shape == (30, 40, 3)
    assert idle(decoder) is before, "what is found by looking costs no process"
    assert peak_mb(decoder) < MOST_MB


@pytest.mark.parametrize("name", hostile_sounds())
def test_sounds(decoder, name):
    before = idle(decoder)
    with pytest.raises(BadFile) as refused:
        decoder.sound(hostile_sounds()[name])
    assert len(str(refused.value)) > 15
    assert decoder.sound(sound(0.5)).seconds == 0.5
    assert idle(decoder) is before and peak_mb(decoder) < MOST_MB


def test_what_is_unusual_and_good_is_taken(decoder):
    few = MAX_PARTS // 4
    for data in (png_with(*[chunk(b"teSt")] * few), scans(64, 64, MAX_SCANS - 12), frames("GIF", 10_000),
                 frames("WEBP", 10_000), picture(kind="JPEG") + picture(kind="JPEG") * 40):  # fmt: skip
        assert decoder.image(data).ndim == 3
    loud = decoder.sound(numbers(100.0, -100.0)).samples
    assert set(np.unique(loud)) == {-32768, 32767}
    assert decoder.sound(wav(bytes(4 * 8000), 4, 8000)).seconds == 1.0
    assert peak_mb(decoder) < MOST_MB


@pytest.mark.parametrize("kind", ["mp3", "opus"])
def test_the_beginning_of_a_stream_is_a_sound(decoder, kind):
    """These have no length that they could fall short of: a recording that was stopped looks the same."""
    assert 0.5 < decoder.sound(cut(kind)).seconds < 2.0


def test_eight_bits_of_31_megabytes_are_half_an_hour(decoder):
    assert decoder.sound(wav(b"\x80" * (31 << 20))).seconds == (31 << 20) / 16_000
    assert peak_mb(decoder) < MOST_MB


def test_who_takes_too_long_loses_the_process_and_others_keep_theirs(decoder):
    """A file of 30 MB that makes FFmpeg look for pages which are none."""
    good = cut("opus")
    assert decoder.sound(good).seconds > 0.5
    endless, done, seen = good[:2000] + b"OggS\0\0" * 5_000_000, threading.Event(), []

    def others() -> None:
        while not done.is_set():
            seen.append(decoder.image(picture()).shape)

    beside, before = threading.Thread(target=others), idle(decoder)
    with pytest.raises(BadFile, match="processor time"):
        decoder.sound(endless)
    beside.start()
    try:
        with pytest.raises(BadFile, match="processor time"):
            decoder.length(endless, 3600.0)
    finally:
        done.set()
        beside.join()
    assert before._process.returncode is not None and seen and set(seen) == {(30, 40, 3)}
    assert decoder.sound(good).seconds > 0.5
