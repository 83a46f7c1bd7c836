"""The native bodies of speech: ``{prompt, lang}``, answered with base64, and ``{text, speaker}``, with the sound."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import SEED, Range
from serve_app.api.fields.values import choice, string
from serve_app.api.speech import SAMPLE_RATES, SPEED, SoundForm, SpeakRequest, check_text, parse_voice
from serve_app.api.workers_ai.read import open_native

BIT_RATE = Range(8000, 320_000)
RATE = Range(SAMPLE_RATES[0], SAMPLE_RATES[-1])
# As Deepgram's models call them.
ENCODINGS: dict[str, SoundForm] = {
    "mp3": "mp3", "opus": "opus", "aac": "aac", "flac": "flac", "linear16": "wav", "wav": "wav", "pcm": "pcm",
}  # fmt: skip
CONTAINERS = ("none", "wav", "ogg")


def parse_speak(body: dict[str, Any]) -> SpeakRequest:
    """``lang`` is not looked at: a model speaks the language that it has learnt."""
    body, asked = open_native(body)
    named = "text" if body.get("text") is not None and body.get("prompt") is None else "prompt"
    text = check_text(string(body, named), named)
    form = ENCODINGS[choice(body, "encoding", tuple(ENCODINGS)) or "mp3"]
    container = choice(body, "container", CONTAINERS)
    if container == "none" and form == "wav":
        form = "pcm"
    rate = RATE.read(body, "sample_rate")
    if rate is not None and rate not in SAMPLE_RATES:
        raise InvalidInput(f"sample_rate must be one of {', '.join(map(str, SAMPLE_RATES))}.", param="sample_rate")
    voice = "speaker" if body.get("speaker") is not None else "voice"
    return SpeakRequest(
        text,
        parse_voice(body.get(voice), voice),
        SPEED.read(body, "speed") or 1.0,
        SEED.read(body, "seed") or 0,
        form,
        rate,
        BIT_RATE.read(body, "bit_rate"),
        named == "prompt",
        **asked,
    )
