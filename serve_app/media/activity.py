"""Where somebody speaks: spans of a sound that are louder than what is always there.

The loudness of each hundredth of a second is compared with the quietest moment of the seconds around it, as minimum
statistics do (Martin 2001). No model is needed, and no language is known better than another; whoever speaks over music
is heard with it, and music alone is heard as well. What is unclear counts as speech: leaving words out is worse than
hearing silence.

::

    loudness  ▁▁▂▇▆▇▅▁▁▁▁▁▁▆▇▆▁▁▁
    spans        [-----)    [--)      longer pauses than ``pause_s`` lie between
    padded     [---------)[-----)     a little before and behind: words begin and end softly
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.int16]

RATE = 16_000
FRAME = 160
FRAME_S = FRAME / RATE
# Frames whose loudness is found at once: half a minute.
PIECE = 3000
# Bins of 50 Hz: 150 to 3800.
VOICE = slice(3, 77)
# Decibels of full scale: nothing below the first is heard, nothing is quieter than the second, and where it is never
# quieter than the third nobody can tell by loudness who speaks.
QUIET_DB = -60.0
FLOOR_DB = -75.0
LOUD_DB = -36.0
# Seconds before and behind a moment in which its floor is looked for. Who speaks pauses more often.
AROUND_S = 5
# Frames that loudness is averaged over, and frames of speech before any is believed: a click is shorter.
SMOOTH = 5
LEAST = 6


@dataclass(slots=True, frozen=True)
class Pauses:
    """``threshold``: 0 (everything that stands out a little) to 1. Spans end with pauses of ``pause_s``, and are
    ``before_s`` and ``behind_s`` longer than what was heard.
    """

    threshold: float = 0.5
    pause_s: float = 1.0
    before_s: float = 0.3
    behind_s: float = 0.3

    @property
    def above_db(self) -> float:
        """How far above the floor speech is."""
        return 4.0 + 10.0 * self.threshold


def loudness(samples: Samples) -> npt.NDArray[np.float32]:
    """Decibels of full scale around each frame, of what voices are made of: hum and hiss are left out."""
    count = len(samples) // FRAME
    found = np.empty(count, np.float32)
    window = np.hanning(2 * FRAME).astype(np.float32)
    scale = 2 / float(np.square(window).sum() * 2 * FRAME)
    for at in range(0, count, PIECE):
        many = min(PIECE, count - at)
        piece = samples[at * FRAME : (at + many + 1) * FRAME].astype(np.float32) / 32768
        piece = np.pad(piece, (0, (many + 1) * FRAME - len(piece)))
        halves = piece.reshape(-1, FRAME)
        heard = np.fft.rfft(np.concatenate([halves[:-1], halves[1:]], 1) * window)[:, VOICE]
        found[at : at + many] = 10 * np.log10(np.maximum(np.square(np.abs(heard)).sum(1) * scale, 1e-12))
    return found


def speaking(levels: npt.NDArray[np.float32], pauses: Pauses) -> npt.NDArray[np.bool_]:
    """Whether somebody may speak, of each frame of such a loudness."""
    heard = _smooth(levels)
    floor = _floor(heard)
    return (heard > QUIET_DB) & ((heard > floor + pauses.above_db) | (floor > LOUD_DB))


def spans(samples: Samples, pauses: Pauses) -> list[tuple[int, int]]:
    """First and last (exclusive) sample of each span in which somebody may speak, in order and apart."""
    speaks = speaking(loudness(samples), pauses)
    # Where speech begins and where it ends.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], speaks, [False]]).astype(np.int8)))
    runs = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    joined: list[tuple[int, int]] = []
    for begin, end in runs:
        if joined and (begin - joined[-1][1]) * FRAME_S < pauses.pause_s:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    padded: list[tuple[int, int]] = []
    before, behind = round(pauses.before_s * RATE), round(pauses.behind_s * RATE)
    for begin, end in joined:
        if end - begin < LEAST:
            continue
        first, last = max(begin * FRAME - before, 0), min(end * FRAME + behind, len(samples))
        if padded and first <= padded[-1][1]:
            padded[-1] = (padded[-1][0], last)
        else:
            padded.append((first, last))
    return padded


def _smooth(levels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if len(levels) < SMOOTH:
        return levels
    edged = np.pad(levels, SMOOTH // 2, mode="edge")
    return np.convolve(edged, np.full(SMOOTH, 1 / SMOOTH, np.float32), "valid").astype(np.float32)


def _floor(levels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The quietest moment around each frame, by seconds."""
    a_second = round(1 / FRAME_S)
    seconds = [float(levels[at : at + a_second].min()) for at in range(0, len(levels), a_second)]
    around = [max(min(seconds[max(at - AROUND_S, 0) : at + AROUND_S + 1]), FLOOR_DB) for at in range(len(seconds))]
    return np.repeat(np.asarray(around, np.float32), a_second)[: len(levels)]


class Spoken:
    """A sound without its pauses, and its times in the whole one."""

    def __init__(self, samples: Samples, found: list[tuple[int, int]]) -> None:
        self._spans = found
        # Where each span begins in what is heard.
        self._begins = [0, *accumulate(end - begin for begin, end in found)]
        self.samples = _joined(samples, found)

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    def place(self, segments: list[dict[str, Any]]) -> None:
        """Has segments and their words tell the times of the whole sound."""
        for one in segments:
            for timed in (one, *one.get("words", ())):
                timed["start"] = round(self.time(timed["start"]), 3)
                timed["end"] = round(self.time(timed["end"], end=True), 3)

    def time(self, seconds: float, *, end: bool = False) -> float:
        """A moment of the whole sound. ``end``: of two spans that meet there, in the first."""
        at = seconds * RATE
        place = (bisect_left if end else bisect_right)(self._begins, at) - 1
        place = max(0, min(place, len(self._spans) - 1))
        begin, last = self._spans[place]
        return min(begin + at - self._begins[place], last) / RATE


def _joined(samples: Samples, found: list[tuple[int, int]]) -> Samples:
    """In a file without a name, as the sound itself: hours of it are not to be in memory."""
    length = sum(end - begin for begin, end in found)
    if not length:
        return samples[:0]
    with tempfile.TemporaryFile() as file:
        for begin, end in found:
            for at in range(begin, end, PIECE * FRAME):
                file.write(samples[at : min(at + PIECE * FRAME, end)].tobytes())
        file.flush()
        joined: Any = np.memmap(file, np.int16, "r", shape=(length,))
    return np.asarray(joined)
