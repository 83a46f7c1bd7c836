"""JSON Schemas of text embeddings, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api import multi_vector
from serve_app.api.fields.ranges import WEIGHT
from serve_app.api.schema.parts import Schema, contexts_schema, field, object_, shorten_fields, usage_schema
from serve_app.api.workers_ai import read as workers_ai


def input_schema() -> Schema:
    text = {
        "description": "The text to embed, or several.",
        "oneOf": [
            {"type": "string", "minLength": 1},
            {
                "type": "array",
                "minItems": 1,
                "maxItems": workers_ai.MAX_TEXTS,
                "items": {"type": "string", "minLength": 1},
            },
        ],
    }
    pooling = field("string", "How token vectors become one.", enum=["mean", "cls"])
    readings = {
        "return_dense": field("boolean", "The vector of the text.", default=True),
        "return_sparse": field("boolean", "lexical_weights, where the model has them.", default=False),
        "return_colbert_vecs": field("boolean", "A vector per token, where the model has them.", default=False),
    }
    weight = WEIGHT.schema
    scored = {
        "query": field("string", "Scores contexts against this."),
        "contexts": contexts_schema(),
        "pooling": pooling,
        "score_mode": field("string", "What scores compare.", enum=list(multi_vector.MODES), default="dense"),
        "score_weights": field("array", "Of dense, sparse and colbert in all.", items=weight, minItems=3, maxItems=3),
        **readings,
        **shorten_fields(),
    }
    more = {
        "instruction": field("string", "What queries are for, where the model takes that."),
        "pooling": pooling,
        **readings,
        **shorten_fields(),
    }
    forms = [object_({name: text, **more}, [name]) for name in ("text", "queries", "documents")]
    return {"type": "object", "oneOf": [*forms, object_(scored, ["contexts"])]}


def output_schema() -> Schema:
    vectors = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    fields = {
        "shape": {"type": "array", "items": {"type": "integer"}},
        "data": vectors,
        "pooling": {"type": "string", "enum": ["mean", "cls"]},
        "usage": usage_schema(output=False),
    }
    return object_(fields, ["shape", "data"])
