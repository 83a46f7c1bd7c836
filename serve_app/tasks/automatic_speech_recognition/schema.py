"""JSON Schemas of speech recognition, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api.fields.files import file_schema
from serve_app.api.schema.parts import Schema, field, object_, ranged
from serve_app.tasks.automatic_speech_recognition import read


def input_schema() -> Schema:
    fields = {
        "audio": file_schema("A sound file: WAV, FLAC, MP3, Ogg, M4A or WebM."),
        "task": field("string", "translate: into English.", enum=["transcribe", "translate"], default="transcribe"),
        "language": field("string", "Code of the language that is spoken; found out where it is left out."),
        "initial_prompt": field("string", "Words that may occur.", maxLength=read.MAX_PROMPT),
        "prefix": field("string", "The same.", maxLength=read.MAX_PROMPT),
        "beam_size": ranged(read.BEAMS, "Beams of the search; 1 is greedy.", default=1),
        "vad_filter": field("boolean", "Leaves pauses out before anything is heard.", default=False),
        "no_speech_threshold": ranged(
            read.SHARE, "Windows that are likelier than this to hold no speech are left out."
        ),
        "log_prob_threshold": ranged(read.LOGPROB, "Only where their text is less likely than this, on average."),
    }
    return object_(fields, ["audio"])


def output_schema() -> Schema:
    number = {"type": "number"}
    word = object_({"word": {"type": "string"}, "start": number, "end": number}, ["word", "start", "end"])
    segment = object_(
        {"start": number, "end": number, "text": {"type": "string"}, "words": {"type": "array", "items": word}}
    )
    info = object_({"language": {"type": "string"}, "language_probability": number, "duration": number})
    fields = {
        "text": {"type": "string"},
        "word_count": {"type": "integer"},
        "words": {"type": "array", "items": word},
        "segments": {"type": "array", "items": segment},
        "vtt": {"type": "string"},
        "transcription_info": info,
    }
    return object_(fields, ["text", "word_count", "vtt"])
