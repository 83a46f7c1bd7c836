"""Turns in a sound that is still coming."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.media.activity import Pauses
from serve_app.media.listening import LONGEST_S, Listening, Turn
from tests.predict.test_activity import hiss, talk, voice

PAUSES = Pauses(pause_s=0.5)


def heard(listening: Listening, samples: np.ndarray, step: int = 1111) -> list[Turn]:
    data = samples.tobytes()
    return [turn for at in range(0, len(data), 2 * step) for turn in listening.feed(data[at : at + 2 * step])]


def at_24_khz(samples: np.ndarray) -> np.ndarray:
    count = len(samples) * 3 // 2
    return np.interp(np.arange(count) / 1.5, np.arange(len(samples)), samples).astype(np.int16)


@pytest.mark.parametrize("rate", [16_000, 24_000])
@pytest.mark.parametrize("db", [None, -55])
def test_turns_begin_and_end_with_speech(rate, db):
    sound = talk((2, False), (1.5, True), (2, False), (0.5, True), (0.2, False), (2, True), (1, False))
    sound = sound if db is None else sound + hiss(len(sound) / 16_000, db)
    sound = sound if rate == 16_000 else at_24_khz(sound)
    turns = heard(Listening(rate, PAUSES), sound)
    assert [turn.kind for turn in turns] == ["begins", "ends"] * 2
    for (begins, ends), (said, over) in zip(
        zip(turns[::2], turns[1::2], strict=True), ((2, 3.5), (5.5, 8.2)), strict=True
    ):
        assert said - 0.5 < begins.at / 1000 < said and over + 0.3 < ends.at / 1000 < over + 0.8
        assert len(ends.pcm) == 2 * rate * (ends.at - begins.at) // 1000
        first = rate * begins.at // 1000
        assert np.array_equal(np.frombuffer(ends.pcm, np.int16), sound[first : first + len(ends.pcm) // 2])
    # However it is cut into pieces.
    assert turns == heard(Listening(rate, PAUSES), sound, 40_000)


def test_long_turns_are_cut_and_silence_is_forgotten():
    listening = Listening(16_000, PAUSES)
    turns = heard(listening, np.concatenate([voice(1), voice(2 * LONGEST_S)]))
    assert [turn.kind for turn in turns] == ["begins", "ends"] * 2 + ["begins"]
    assert [len(turn.pcm) for turn in turns[1::2]] == [32_000 * LONGEST_S] * 2 and listening.speaking
    assert len(listening.so_far()) == 32_000
    assert (last := listening.end()) is not None and len(last.pcm) == 32_000 and listening.end() is None
    assert heard(listening, np.zeros(60 * 16_000, np.int16)) == []
    assert len(listening._kept) < 2 * 32_000 and listening.seconds == pytest.approx(117, abs=1)
