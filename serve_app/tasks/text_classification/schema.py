"""JSON Schemas of text classification, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api.schema.parts import Schema, field, object_


def input_schema() -> Schema:
    return object_({"text": field("string", "The text to classify.", minLength=1)}, ["text"])


def output_schema() -> Schema:
    label = object_({"label": {"type": "string"}, "score": {"type": "number"}}, ["label", "score"])
    return {"type": "array", "items": label}
