"""JSON Schemas of speech, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api.fields.ranges import SEED
from serve_app.api.schema.parts import Schema, field, object_, ranged
from serve_app.api.speech import MAX_CHARS, SAMPLE_RATES, SPEED
from serve_app.tasks.text_to_speech.read import BIT_RATE, CONTAINERS, ENCODINGS


def input_schema() -> Schema:
    common = {
        "speaker": field(["string", "integer"], "The number of a voice, of models that have several."),
        "voice": field(["string", "integer"], "The same."),
        "speed": ranged(SPEED, "How fast it is said.", default=1),
        "seed": ranged(SEED, "Decides about all that is left to chance.", default=0),
        "encoding": field("string", "The format of the sound.", enum=list(ENCODINGS), default="mp3"),
        "container": field("string", "none: linear16 without a header.", enum=list(CONTAINERS)),
        "sample_rate": field("integer", "Samples a second; the model's own unless given.", enum=list(SAMPLE_RATES)),
        "bit_rate": ranged(BIT_RATE, "Bits a second, of mp3, opus and aac."),
    }
    said = {"type": "string", "minLength": 1, "maxLength": MAX_CHARS}
    lang = field("string", "Taken and not used: a model speaks its own language.", default="en")
    whole = {"prompt": {**said, "description": "What to say; answered with base64."}, "lang": lang, **common}
    raw = {"text": {**said, "description": "What to say; answered with the sound itself."}, **common}
    return {
        "type": "object",
        "oneOf": [
            {"title": "Base64", **object_(whole, ["prompt"])},
            {"title": "Sound", **object_(raw, ["text"])},
        ],
    }


def output_schema() -> Schema:
    coded = object_({"audio": {"type": "string", "contentEncoding": "base64"}}, ["audio"])
    return {"oneOf": [coded, {"type": "string", "format": "binary", "contentMediaType": "audio/mpeg"}]}
