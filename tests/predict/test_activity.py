"""Pauses that are taken out before a sound is heard: where they are found, and where words lie in the whole sound."""

from __future__ import annotations

import json
import wave
from dataclasses import asdict

import numpy as np
import pytest

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.media.activity import RATE, Pauses, Spoken, spans
from tests.predict.conftest import call
from tests.predict.test_speech import noise, theirs, wav, whisper


def voice(seconds: float, seed: int = 0) -> np.ndarray:
    """Syllables: vowels of four harmonics, four a second, none of them loud at its ends."""
    rng, count = np.random.default_rng(seed), int(seconds * RATE)
    at = np.arange(count) / RATE
    sound = sum(np.sin(2 * np.pi * pitch * at + rng.uniform(0, 6)) for pitch in (180, 360, 900, 2200))
    return (1500 * sound * np.abs(np.sin(np.pi * 4 * at))).astype(np.int16)


def hiss(seconds: float, db: float, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 32768 * 10 ** (db / 20), int(seconds * RATE))).clip(-32768, 32767).astype(np.int16)


def talk(*parts: tuple[float, bool]) -> np.ndarray:
    """Seconds of speech and of none, by turns as they are given."""
    return np.concatenate(
        [voice(s, n) if said else np.zeros(int(s * RATE), np.int16) for n, (s, said) in enumerate(parts)]
    )


@pytest.mark.parametrize("db", [None, -60, -50, -45])
def test_speech_is_kept_and_pauses_are_not(db):
    clean = talk((2, False), (1.5, True), (3, False), (0.5, True), (0.4, False), (2, True), (4, False))
    sound = clean if db is None else clean + hiss(len(clean) / RATE, db)
    found = [(first / RATE, last / RATE) for first, last in spans(sound, Pauses())]
    # The pause within the second one is too short, and both are heard a little before and behind.
    assert len(found) == 2
    for (begin, end), (says, ends) in zip(found, ((2.0, 3.5), (6.5, 9.4)), strict=True):
        assert says - 0.5 < begin < says - 0.15 and ends + 0.15 < end < ends + 0.5
    shorter = spans(sound, Pauses(pause_s=0.2, before_s=0.05, behind_s=0.05))
    assert len(shorter) == 3


def test_what_is_unclear_is_heard():
    """Noise that is as loud as speech, a voice without a pause in it, and no sound at all."""
    loud = hiss(6, -25)
    assert spans(loud, Pauses()) == [(0, len(loud))]
    for silent in (np.zeros(5 * RATE, np.int16), hiss(5, -70), np.zeros(0, np.int16), np.zeros(100, np.int16)):
        assert spans(silent, Pauses()) == []
    click = np.zeros(5 * RATE, np.int16)
    click[2 * RATE : 2 * RATE + 50] = 20_000
    assert spans(click, Pauses()) == []
    assert spans(voice(60), Pauses()) == [(0, 60 * RATE)]


def test_times_are_those_of_the_whole_sound():
    sound = np.arange(10 * RATE).astype(np.int16)
    spoken = Spoken(sound, [(RATE, 3 * RATE), (6 * RATE, 7 * RATE)])
    assert spoken.seconds == 3 and np.array_equal(spoken.samples[2 * RATE :], sound[6 * RATE : 7 * RATE])
    assert [spoken.time(at) for at in (0, 1.5, 2, 2.5, 3, 9)] == [1, 2.5, 6, 6.5, 7, 7]
    assert [spoken.time(at, end=True) for at in (0, 2, 2.5, 3)] == [1, 3, 6.5, 7]


@pytest.mark.slow
async def test_transcripts_are_those_of_what_is_heard(work, tmp_path):
    """As transformers has them for the sound without its pauses; times lie in the whole one."""
    folder = tmp_path / "model"
    model = whisper(folder, 6)
    worker = work("automatic-speech-recognition", folder)
    said = [noise(2.0, 3), noise(2.5, 4)]
    quiet = np.zeros(4 * RATE, np.int16)
    sound = np.concatenate([quiet, said[0], quiet, said[1], quiet])
    pauses = {"threshold": 0.5, "pause_s": 1.0, "before_s": 0.0, "behind_s": 0.0}
    found = await worker.predict(call(wav(sound), language="en", words=True, pauses=pauses))
    [told] = map(json.loads, found.results)
    joined = Spoken(sound, spans(sound, Pauses(**pauses)))
    assert 3.5 < joined.seconds < 5.0 and told["heard"] == round(joined.seconds, 3) and told["duration"] == 16.5
    assert found.units == {"audio_ms": 16_500}
    wanted = theirs(model, folder, np.asarray(joined.samples), task="transcribe", language="en")
    assert told["segments"] and sum((s["tokens"] for s in told["segments"]), []) == wanted["sequences"][0].tolist()
    plain = json.loads(
        (await worker.predict(call(wav(np.asarray(joined.samples)), language="en", words=True))).results[0]
    )
    for ours, other in zip(told["segments"], plain["segments"], strict=True):
        assert ours["start"] == round(joined.time(other["start"]), 3)
        assert ours["end"] == round(joined.time(other["end"], end=True), 3)
        times = [time for word in ours["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)

    # Where nobody speaks nothing is computed.
    before = worker.stats().numbers["batches"]
    [silence] = map(json.loads, (await worker.predict(call(wav(quiet), pauses=pauses))).results)
    assert (silence["text"], silence["segments"], silence["heard"], silence["duration"]) == ("", [], 0.0, 4.0)
    assert worker.stats().numbers["batches"] == before


async def test_a_recogniser_invents_nothing_in_pauses(work):
    """One that comes with the project, which writes down a sentence for whatever it hears."""
    folder = PROJECT_ROOT / "checkpoints" / "pico-hearing"
    worker = work("automatic-speech-recognition", folder)
    with wave.open(str(folder / "example.wav")) as file:
        said = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    hissing = [hiss(seconds, -60) for seconds in (4, 6, 3, 5)]
    sound = np.concatenate([hissing[0], said, hissing[1], said, hissing[2], said, hissing[3]])
    [alone, all_of_it] = [
        json.loads((await worker.predict(call(wav(samples), pauses=asdict(Pauses())))).results[0])
        for samples in (said, sound)
    ]
    assert alone["text"].startswith(" Turn off") and all_of_it["text"] == 3 * alone["text"]
    begins, ends = zip(*((one["start"], one["end"]) for one in all_of_it["segments"]), strict=True)
    assert begins[0] > 3.5 and 16 < ends[-1] < 21 and list(begins) == sorted(begins)
