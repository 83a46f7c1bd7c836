"""JSON Schemas of OpenAI's routes of sound."""

from __future__ import annotations

from serve_app.api.fields.ranges import SEED
from serve_app.api.openai import audio, speech
from serve_app.api.schema.parts import Schema, field, object_, ranged
from serve_app.api.speech import MAX_CHARS, MEDIA_TYPES, SPEED
from serve_app.api.transcripts import SpeechTask

EXAMPLE = {"model": "@cf/openai/whisper", "file": "(a WAV file)"}
SPEECH = {"model": "@cf/pico/pico-speaker", "input": "Good morning.", "voice": "0"}


def transcript_form(task: SpeechTask) -> Schema:
    file = {"type": "string", "format": "binary", "description": "WAV, FLAC, MP3, Ogg, M4A or WebM."}
    fields = {
        "file": file,
        "model": field("string", "A model that writes down speech.", minLength=1),
        "prompt": field("string", "Words that may occur.", maxLength=audio.MAX_PROMPT),
        "response_format": field("string", "How the transcript is written.", enum=list(audio.FORMATS), default="json"),
        "temperature": field("number", "Not used: the likeliest text is told.", minimum=0, maximum=1),
    }
    if task == "transcribe":
        granularity = {"type": "string", "enum": list(audio.GRANULARITIES)}
        fields |= {
            "language": field("string", "Code of the language that is spoken; found out where it is left out."),
            "timestamp_granularities": field("array", "Of verbose_json.", items=granularity),
            "stream": field("boolean", "Sends the segments as events.", default=False),
            "chunking_strategy": field(
                ["string", "object"], "auto or server_vad: leaves pauses out before anything is heard."
            ),
        }
    return object_(fields, ["file", "model"])


def transcript() -> Schema:
    return object_({"text": field("string", "What is said."), "usage": {"type": "object"}}, ["text"])


def speech_body() -> Schema:
    fields = {
        "model": field("string", "A model that says texts.", minLength=1),
        "input": field("string", "What to say.", minLength=1, maxLength=MAX_CHARS),
        "voice": field(["string", "object"], "The number of a voice, of models that have several; others have one."),
        "response_format": field("string", "The format of the sound.", enum=list(MEDIA_TYPES), default="mp3"),
        "speed": ranged(SPEED, "How fast it is said.", default=1),
        "seed": ranged(SEED, "Decides about all that is left to chance.", default=0),
        "stream_format": field("string", "sse: as events.", enum=list(speech.STREAM_FORMATS), default="audio"),
        "instructions": field("string", "Taken and not used: no model here follows any."),
    }
    return object_(fields, ["model", "input"])


def spoken() -> Schema:
    return {"type": "string", "format": "binary", "contentMediaType": "audio/mpeg"}
