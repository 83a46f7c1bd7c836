"""JSON Schemas of reranking, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api.fields.ranges import BEST
from serve_app.api.schema.parts import Schema, contexts_schema, field, object_, ranged, usage_schema


def input_schema() -> Schema:
    fields = {
        "query": field("string", "What the contexts are ranked for.", minLength=1),
        "contexts": contexts_schema(),
        "top_k": ranged(BEST, "Returns only this many of the best."),
    }
    return object_(fields, ["query", "contexts"])


def output_schema() -> Schema:
    item = object_({"id": field("integer", "Index into contexts."), "score": {"type": "number"}}, ["id", "score"])
    return object_({"response": {"type": "array", "items": item}, "usage": usage_schema(output=False)}, ["response"])
