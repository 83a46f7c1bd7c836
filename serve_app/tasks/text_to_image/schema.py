"""JSON Schemas of drawing, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api.drawing import GUIDANCE, MAX_CHARS, SIDE, STRENGTH
from serve_app.api.fields.files import file_schema
from serve_app.api.fields.ranges import SEED, Range
from serve_app.api.schema.parts import Schema, asked_fields, field, object_, ranged

# Of any model; a record may have a lower bound.
STEPS = Range(1, 100)


def input_schema() -> Schema:
    coded = {"type": "string", "minLength": 1}
    fields = {
        "prompt": field("string", "What to draw.", minLength=1, maxLength=MAX_CHARS),
        "negative_prompt": field("string", "What is not to be seen.", maxLength=MAX_CHARS),
        "width": ranged(SIDE, "Pixels; a square with the model's own side unless given."),
        "height": ranged(SIDE, "Pixels."),
        "image": file_schema("A picture to change."),
        "mask": file_schema("What to draw anew of the picture: white is, black is not."),
        "strength": ranged(STRENGTH, "How much of the picture is changed.", default=1),
        "num_steps": ranged(STEPS, "Steps of drawing; models have bounds of their own."),
        "guidance": ranged(GUIDANCE, "How closely the text is followed."),
        "seed": ranged(SEED, "The same seed gives the same picture."),
        "stream": field("boolean", "Tells the progress, and the picture, by server-sent events.", default=False),
        **asked_fields(),
    }
    named = {"steps": ranged(STEPS, "The same as num_steps.")}
    others = {"image_b64": {**coded, "description": "Base64 of image."}, "mask_b64": coded}
    return {
        "type": "object",
        "properties": fields,
        "required": ["prompt"],
        "anyOf": [
            {"title": "Drawing"},
            {"title": "Other names", **object_({**named, **others})},
        ],
    }


def output_schema() -> Schema:
    coded = object_({"image": {"type": "string", "contentEncoding": "base64"}}, ["image"])
    return {"oneOf": [coded, {"type": "string", "format": "binary", "contentMediaType": "image/png"}]}
