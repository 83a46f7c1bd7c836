"""A sound that is still being spoken: when somebody begins, and when the turn is over.

The rules are those of whole sounds (`serve_app.media.activity`), looked at again whenever a tenth of a second has come;
what comes later is not known yet, so the floor is that of the seconds before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from serve_app.media.activity import FRAME, FRAME_S, LEAST, QUIET_DB, Pauses, loudness, speaking

# Frames that are looked back at, and that come together.
BACK = 1200
AT_ONCE = 10
# A turn that lasts longer is cut, so that what is heard again and again stays short.
LONGEST_S = 28.0


@dataclass(slots=True, frozen=True)
class Turn:
    """``at``: milliseconds since the sound began. ``pcm``: of a turn that ended, its sound."""

    kind: Literal["begins", "ends"]
    at: int
    pcm: bytes = b""


class Listening:
    """One sound as it comes: 16-bit samples of one channel, ``rate`` a second."""

    def __init__(self, rate: int, pauses: Pauses) -> None:
        self._rate, self._pauses = rate, pauses
        # Bytes of a frame.
        self._step = 2 * (rate // 100)
        self._rest = b""
        self._kept = bytearray()
        # Frames that were dropped of what is kept, and that have come.
        self._first = 0
        self._frames = 0
        self._last = np.zeros(FRAME, np.int16)
        # A room is quiet before anybody speaks in it.
        self._levels: npt.NDArray[np.float32] = np.full(BACK, QUIET_DB, np.float32)
        self._began: int | None = None

    @property
    def speaking(self) -> bool:
        return self._began is not None

    @property
    def seconds(self) -> float:
        """Of all that has come."""
        return self._frames * FRAME_S

    def so_far(self) -> bytes:
        """The sound of the turn under way."""
        return b"" if self._began is None else self._sound(self._began, self._frames)

    def feed(self, pcm: bytes) -> list[Turn]:
        """Takes sound of any length; the turns that begin or end with it."""
        come = self._rest + pcm
        found: list[Turn] = []
        step = AT_ONCE * self._step
        whole = len(come) - len(come) % step
        for at in range(0, whole, step):
            self._hear(come[at : at + step])
            found += self._look()
        self._rest = come[whole:]
        return found

    def end(self) -> Turn | None:
        """The turn under way, which is over now."""
        return None if self._began is None else self._ended(self._frames)

    def _hear(self, piece: bytes) -> None:
        self._kept += piece
        self._frames += AT_ONCE
        given = np.frombuffer(piece, "<i2")
        count = AT_ONCE * FRAME
        samples = given if self._rate == FRAME * 100 else np.interp(
            np.arange(count) * (len(given) / count), np.arange(len(given)), given
        ).astype(np.int16)  # fmt: skip
        # Each level is that of two frames, so the last one waits.
        levels = loudness(np.concatenate([self._last, samples]))[:-1]
        self._last = samples[-FRAME:]
        self._levels = np.concatenate([self._levels, levels])[-BACK:]

    def _look(self) -> list[Turn]:
        speaks = speaking(self._levels, self._pauses)
        if self._began is None:
            if not speaks[-LEAST:].all():
                self._forget(self._frames - round((self._pauses.before_s + 1.0) / FRAME_S))
                return []
            quiet = np.flatnonzero(~speaks)
            since = self._frames - (BACK - 1 - (int(quiet[-1]) if len(quiet) else -1))
            self._began = max(since - round(self._pauses.before_s / FRAME_S), self._first)
            return [Turn("begins", round(self._began * FRAME_S * 1000))]
        if not speaks[-max(1, round(self._pauses.pause_s / FRAME_S)) :].any():
            return [self._ended(self._frames)]
        if (self._frames - self._began) * FRAME_S >= LONGEST_S:
            ended = self._ended(self._frames)
            self._began = self._frames
            return [ended, Turn("begins", ended.at)]
        return []

    def _ended(self, last: int) -> Turn:
        assert self._began is not None
        sound = self._sound(self._began, last)
        self._began = None
        self._forget(last)
        return Turn("ends", round(last * FRAME_S * 1000), sound)

    def _sound(self, first: int, last: int) -> bytes:
        return bytes(self._kept[(first - self._first) * self._step : (last - self._first) * self._step])

    def _forget(self, before: int) -> None:
        if before > self._first:
            del self._kept[: (before - self._first) * self._step]
            self._first = before
