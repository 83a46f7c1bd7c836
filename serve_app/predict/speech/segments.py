"""A window's tokens to segments, and where the next window begins: the rule of Whisper's long transcripts.

Radford et al. 2022, 3.8; the same decisions as transformers' ``WhisperGenerationMixin``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Seconds of a timestamp token, and of a frame.
TOKEN_S = 0.02
FRAME_S = 0.01


@dataclass(slots=True, frozen=True)
class Segment:
    """``start``, ``end``: seconds within the window. ``first``, ``last``: places of its tokens in the window's."""

    start: float
    end: float
    first: int
    last: int


def split(tokens: Sequence[int], begin: int, frames: int, stride: int) -> tuple[list[Segment], int]:
    """The segments of a window with ``frames`` to hear, and how many of these are done.

    ``begin``: the first timestamp token. ``stride``: frames of one position of the encoder. What follows the last
    complete segment is heard again from its beginning, since a window cuts right into speech.
    """
    marks = [token >= begin for token in tokens]
    ends = [i + 1 for i in range(len(marks) - 1) if marks[i] and marks[i + 1]]
    if not ends:
        return [Segment(0.0, _end(tokens, marks, begin, frames), 0, len(tokens))], frames
    single = marks[-2:] == [False, True]
    if single:
        ends.append(len(tokens))
    else:
        # The second mark belongs to the last segment: it tells that the window ended behind it.
        ends[-1] += 1
    parts, at = [], 0
    for number, end in enumerate(ends):
        closing = tokens[end - (2 if number == len(ends) - 1 and not single else 1)]
        parts.append(Segment((tokens[at] - begin) * TOKEN_S, (closing - begin) * TOKEN_S, at, end))
        at = end
    # One mark at the end: nothing is said behind it.
    return parts, frames if single else (tokens[at - 2] - begin) * stride


def _end(tokens: Sequence[int], marks: Sequence[bool], begin: int, frames: int) -> float:
    """Of a window that is one segment: the last mark, if it says anything, or the window's end."""
    told = [token for token, mark in zip(tokens, marks, strict=True) if mark]
    if told and told[-1] != begin:
        return (told[-1] - begin) * TOKEN_S
    return int(frames * FRAME_S / TOKEN_S) * TOKEN_S
