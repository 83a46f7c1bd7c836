"""JSON Schemas of OpenAI's routes of pictures."""

from __future__ import annotations

from serve_app.api.drawing import COPIES, GUIDANCE, MAX_CHARS, QUALITY, STRENGTH
from serve_app.api.fields.ranges import SEED, Range
from serve_app.api.openai.drawing import FORMS
from serve_app.api.schema.parts import Schema, asked_fields, field, object_, ranged

GENERATION = {"model": "@cf/black-forest-labs/flux-1-schnell", "prompt": "A lighthouse at dawn", "size": "1024x1024"}
EDIT = {"model": "@cf/runwayml/stable-diffusion-v1-5-img2img", "prompt": "In winter", "image": "(a PNG file)"}
STEPS = Range(1, 100)


def _fields() -> Schema:
    return {
        "model": field("string", "A model that draws.", minLength=1),
        "prompt": field("string", "What to draw.", minLength=1, maxLength=MAX_CHARS),
        "n": ranged(COPIES, "Pictures.", default=1),
        "size": field("string", "Width and height, such as 1024x768, or auto.", default="auto"),
        "output_format": field("string", "Of the files.", enum=list(FORMS), default="png"),
        "output_compression": ranged(QUALITY, "Quality of JPEG and WebP."),
        "response_format": field("string", "Base64 alone.", enum=["b64_json"]),
        "background": field("string", "Never transparent.", enum=["auto", "opaque"]),
        "stream": field("boolean", "Sends events; the progress stands in comments.", default=False),
        "seed": ranged(SEED, "Of the first picture; each further one has the next."),
        "num_steps": ranged(STEPS, "Steps of drawing."),
        "steps": ranged(STEPS, "The same."),
        "guidance": ranged(GUIDANCE, "How closely the text is followed."),
        "negative_prompt": field("string", "What is not to be seen.", maxLength=MAX_CHARS),
    }


def generation_body() -> Schema:
    return object_({**_fields(), **asked_fields()}, ["model", "prompt"])


def edit_form() -> Schema:
    file = {"type": "string", "format": "binary"}
    more = {
        "image": {**file, "description": "The picture to change."},
        "mask": {**file, "description": "Where it is transparent, or white if nothing is, the picture is drawn anew."},
        "strength": ranged(STRENGTH, "How much of the picture is changed.", default=1),
    }
    return object_({**_fields(), **more}, ["model", "prompt", "image"])


def pictures() -> Schema:
    one = object_({"b64_json": {"type": "string", "contentEncoding": "base64"}}, ["b64_json"])
    fields = {"created": {"type": "integer"}, "data": {"type": "array", "items": one}, "usage": {"type": "object"}}
    return object_(fields, ["created", "data"])
