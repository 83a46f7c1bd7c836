"""Requests for transcripts, and the forms that transcripts take; one for all dialects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from serve_app.api.types import TaskRequest

SpeechTask = Literal["transcribe", "translate"]


@dataclass(slots=True, frozen=True)
class Pauses:
    """What the worker takes for one: ``threshold`` of speech, 0 to 1; seconds that it lasts at least; and seconds that
    are heard before and behind speech.
    """

    threshold: float = 0.5
    pause_s: float = 1.0
    before_s: float = 0.3
    behind_s: float = 0.3


@dataclass(slots=True)
class TranscribeRequest(TaskRequest):
    """``audio``: the file as it came. ``task``: translate is into English. ``language``: None to find out. ``words``:
    whether to tell when each word was said. ``silence``, ``doubt``: thresholds of what is left out as silence.
    ``pauses``: those that are taken out before anything is heard; None: none.
    """

    audio: bytes
    task: SpeechTask = "transcribe"
    language: str | None = None
    prompt: str | None = None
    beams: int = 1
    words: bool = False
    silence: float | None = None
    doubt: float | None = None
    pauses: Pauses | None = None

    @property
    def options(self) -> dict[str, Any]:
        """For the worker."""
        return {
            "task": self.task,
            "language": self.language,
            "prompt": self.prompt,
            "beams": self.beams,
            "words": self.words,
            "silence": self.silence,
            "doubt": self.doubt,
            "pauses": None if self.pauses is None else asdict(self.pauses),
        }


def vtt(segments: Iterable[dict[str, Any]]) -> str:
    """WebVTT (W3C)."""
    cues = [
        f"{_clock(segment['start'], '.')} --> {_clock(segment['end'], '.')}\n{_line(segment['text'])}\n"
        for segment in segments
    ]
    return "\n".join(["WEBVTT\n", *cues])


def srt(segments: Iterable[dict[str, Any]]) -> str:
    """SubRip."""
    return "\n".join(
        f"{number}\n{_clock(segment['start'], ',')} --> {_clock(segment['end'], ',')}\n{_line(segment['text'])}\n"
        for number, segment in enumerate(segments, 1)
    )


def words_of(segments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [word for segment in segments for word in segment.get("words", ())]


def _line(text: str) -> str:
    # An arrow would begin another cue, and an empty line end this one.
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"
