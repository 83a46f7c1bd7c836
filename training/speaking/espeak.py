"""Sentences that libespeak-ng says in one voice, with the time of each letter (Debian: ``apt install espeak-ng``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from training.hearing.voice import RATE, Samples, resampled

VOICE, SPEED = b"en-us", 150
# A pulse every 128 samples, and no melody: what is said of a frame can then be told from its letter. Where pulses of
# any other pitch lie depends on all that was said before.
PITCH, RANGE = 80, 0
# Samples of a frame, the unit of durations.
HOP = 256
# Frames of silence behind a last point.
TAIL = 4
# What a space weighs beside a letter where no pause tells its time.
SPACE = 0.25
WORD, PHONEME = 1, 7
SYNCHRONOUS, PHONEME_EVENTS, UTF8 = 2, 1, 1
RATE_PARAMETER, PITCH_PARAMETER, RANGE_PARAMETER = 1, 3, 4


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    """espeak_EVENT of speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int), ("unique", ctypes.c_uint), ("text_position", ctypes.c_int), ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int), ("sample", ctypes.c_int), ("user_data", ctypes.c_void_p), ("id", _Id),
    )  # fmt: skip


@dataclass(slots=True, frozen=True)
class Told:
    """``frames``: how many each character of ``text`` takes; ``samples`` has `HOP` for each of them."""

    text: str
    samples: Samples
    frames: list[int]


@dataclass(slots=True, frozen=True)
class _Mark:
    """Something that begins at a sample: a word at a place of the text, or a phoneme."""

    kind: int
    at: int
    place: int
    length: int
    name: str

    @property
    def is_pause(self) -> bool:
        return self.name.startswith("_")


class Voice:
    """libespeak-ng is one for a process, and so is this."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libespeak-ng.so.1")
        self._parts: list[Samples] = []
        self._marks: list[_Mark] = []
        self._rate = int(self._library.espeak_Initialize(SYNCHRONOUS, 500, None, PHONEME_EVENTS))
        if self._rate <= 0 or self._library.espeak_SetVoiceByName(VOICE):
            raise RuntimeError("espeak-ng cannot be used: install it with its data (Debian: apt install espeak-ng)")
        self._library.espeak_SetParameter(RATE_PARAMETER, SPEED, 0)
        self._library.espeak_SetParameter(PITCH_PARAMETER, PITCH, 0)
        self._library.espeak_SetParameter(RANGE_PARAMETER, RANGE, 0)
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
        )  # fmt: skip
        self._callback = kind(self._take)
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, sound: ctypes._Pointer[ctypes.c_short], count: int, events: ctypes._Pointer[_Event]) -> int:
        if sound and count:
            self._parts.append(np.ctypeslib.as_array(sound, (count,)).copy())
        index = 0
        while (event := events[index]).type:
            if event.type in (WORD, PHONEME):
                name = bytes(event.id.string).decode() if event.type == PHONEME else ""
                self._marks.append(_Mark(event.type, event.sample, event.text_position - 1, event.length, name))
            index += 1
        return 0

    def say(self, text: str) -> Told:
        self._parts, self._marks = [], []
        data = text.encode() + b"\0"
        self._library.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 1, 0, UTF8, None, None)
        self._library.espeak_Synchronize()
        sound = np.concatenate(self._parts)
        ends = letter_ends(text, self._marks, len(sound))
        frames = framed([end * RATE / self._rate / HOP for end in ends])
        if not text[-1].isalnum():
            frames[-1] += TAIL
        samples = resampled(sound, self._rate)[: sum(frames) * HOP]
        return Told(text, np.pad(samples, (0, sum(frames) * HOP - len(samples))), frames)


def letter_ends(text: str, marks: list[_Mark], total: int) -> list[float]:
    """The sample at which each character is over.

    The phonemes of a word are shared out to its letters evenly: the third of six letters has the third sixth of them.
    Words that are said in one (``in the``) are one. A pause goes to what stands between the words.
    """
    words = [mark for mark in marks if mark.kind == WORD and mark.length > 0]
    sounds = [mark for mark in marks if mark.kind == PHONEME]
    places = [*(word.place for word in words), len(text)]
    places[0] = 0
    begins = [*(word.at for word in words), total]
    ends: list[float] = []
    for (first, last), (begin, end) in zip(pairwise(places), pairwise(begins), strict=True):
        inside = [mark for mark in sounds if begin <= mark.at < end]
        heard = [mark.at for mark in inside if not mark.is_pause]
        pause = next((mark.at for mark in inside if mark.is_pause and mark.at > heard[-1]), None)
        spoken, behind = text[first:last], ""
        if pause is not None:
            kept = spoken.rstrip(" ,.?!")
            spoken, behind = kept, spoken[len(kept) :]
        over = end if pause is None or not behind else pause
        starts = [float(begin), *heard[1:], float(over)]
        weights = np.cumsum([1.0 if char.isalnum() else SPACE for char in spoken])
        where = weights / weights[-1] * (len(starts) - 1)
        ends += np.interp(where, np.arange(len(starts)), starts).tolist()
        ends += [over + (end - over) * (index + 1) / len(behind) for index in range(len(behind))]
    return ends


def framed(ends: list[float]) -> list[int]:
    """Whole frames, at least one for each."""
    out, before = [], 0
    for end in ends:
        after = max(before + 1, round(end))
        out.append(after - before)
        before = after
    return out
