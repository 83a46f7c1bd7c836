"""JSON Schemas of OpenAI's routes of sound."""

from __future__ import annotations

from serve_app.api.openai import audio
from serve_app.api.schema.parts import Schema, field, object_
from serve_app.api.transcripts import SpeechTask

EXAMPLE = {"model": "@cf/openai/whisper", "file": "(a WAV file)"}


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
        }
    return object_(fields, ["file", "model"])


def transcript() -> Schema:
    return object_({"text": field("string", "What is said."), "usage": {"type": "object"}}, ["text"])
