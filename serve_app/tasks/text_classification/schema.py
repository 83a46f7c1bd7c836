"""JSON Schemas of text classification, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api.schema.parts import Schema, field, object_
from serve_app.tasks.candidates import candidate_fields

# What may follow from a text: as transformers asks, after Yin et al. 2019 (https://arxiv.org/abs/1909.00161).
TEMPLATE = "This example is {}."


def input_schema() -> Schema:
    fields = {
        "text": field("string", "The text to classify.", minLength=1),
        **candidate_fields(TEMPLATE, "models trained to tell what follows from a text (MNLI)"),
        "multi_label": field(
            "boolean", "Whether several classes may be right; each has its own score then.", default=False
        ),
    }
    return object_(fields, ["text"])


def output_schema() -> Schema:
    label = object_({"label": {"type": "string"}, "score": {"type": "number"}}, ["label", "score"])
    return {"type": "array", "items": label}
