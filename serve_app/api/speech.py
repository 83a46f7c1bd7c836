"""Requests to say a text, for all dialects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import Range
from serve_app.api.types import TaskRequest

SoundForm = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
MEDIA_TYPES: dict[SoundForm, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
MAX_CHARS = 4096
SPEED = Range(0.25, 4.0, whole=False)
SAMPLE_RATES = (8000, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
# What pcm has where nothing else is asked for, as OpenAI's clients expect it.
PCM_RATE = 24_000


@dataclass(slots=True)
class SpeakRequest(TaskRequest):
    """``voice``: a number, of models with several; None: the first. ``sample_rate``: None for the model's own; bits a
    second: None for the encoder's own. ``seed`` decides about all that is left to chance. ``whole``: the native answer
    is JSON with base64, and not the sound itself. ``stream``: it is sent as it is made.
    """

    text: str
    voice: str | None = None
    speed: float = 1.0
    seed: int = 0
    form: SoundForm = "mp3"
    sample_rate: int | None = None
    bit_rate: int | None = None
    whole: bool = True
    stream: bool = False

    @property
    def rate(self) -> int | None:
        """Samples a second of the answer; None: as the model makes them."""
        return self.sample_rate or (PCM_RATE if self.form == "pcm" else None)


@dataclass(slots=True, frozen=True)
class Spoken:
    """A sentence: ``samples`` little-endian int16 of one channel, ``rate`` of them a second."""

    samples: bytes
    rate: int

    @property
    def milliseconds(self) -> int:
        return -(-len(self.samples) // 2 * 1000 // self.rate)


def check_text(text: str | None, param: str) -> str:
    """What is to be said. Raises `InvalidInput`."""
    if not text:
        raise InvalidInput(
            f"Input does not match the model's schema: required: {param} (a non-empty string).", param=param
        )
    if len(text) > MAX_CHARS:
        raise InvalidInput(
            f"{param} must have at most {MAX_CHARS} characters, got {len(text)}; send it in parts.", param=param
        )
    if not any(char.isalnum() for char in text):
        raise InvalidInput(f"{param} has nothing in it that could be said; send words.", param=param)
    return text


def parse_voice(value: Any, param: str) -> str | None:
    """A voice's name, or OpenAI's object with its ``id``."""
    if isinstance(value, dict):
        value = value.get("id")
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or len(value) > 64:
        raise InvalidInput(f"{param} must be a voice's name, of at most 64 characters.", param=param)
    return value
