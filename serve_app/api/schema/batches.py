"""Schemas of batches and files, in three dialects and our own."""

from __future__ import annotations

from serve_app.api.schema.parts import Schema, field, object_

_COUNT: Schema = {"type": "integer", "minimum": 0}


def file() -> Schema:
    return object_({"id": {"type": "string"}, "object": {"const": "file"}, "bytes": _COUNT}, ["id", "object", "bytes"])


def upload() -> Schema:
    fields = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
    return object_(fields, ["file", "purpose"])


def deleted() -> Schema:
    return object_({"id": {"type": "string"}, "deleted": {"type": "boolean"}}, ["id", "deleted"])


def listed(item: Schema) -> Schema:
    return object_({"data": {"type": "array", "items": item}, "has_more": {"type": "boolean"}}, ["data", "has_more"])


def files_query() -> dict[str, Schema]:
    return {**page_query(), "purpose": {"type": "string"}, "order": {"type": "string", "enum": ["asc", "desc"]}}


def page_query() -> dict[str, Schema]:
    return {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1}}


def anthropic_page_query() -> dict[str, Schema]:
    return {"after_id": {"type": "string"}, "before_id": {"type": "string"}, "limit": {"type": "integer", "minimum": 1}}


def openai_batch() -> Schema:
    counts = object_({name: _COUNT for name in ("total", "completed", "failed")}, ["total", "completed", "failed"])
    fields = {"id": {"type": "string"}, "object": {"const": "batch"}, "status": {"type": "string"}}
    return object_({**fields, "request_counts": counts}, [*fields, "request_counts"])


def openai_create() -> Schema:
    fields = {
        "input_file_id": field("string", "Of a file of requests, one JSON object a line."),
        "endpoint": field("string", "The route that all of them are for."),
        "completion_window": {"const": "24h"},
        "metadata": {"type": "object"},
        "output_expires_after": {"type": "object"},
    }
    return object_(fields, ["input_file_id", "endpoint", "completion_window"])


def anthropic_batch() -> Schema:
    fields: dict[str, Schema] = {"id": {"type": "string"}, "type": {"const": "message_batch"}}
    fields["processing_status"] = {"type": "string", "enum": ["in_progress", "canceling", "ended"]}
    return object_({**fields, "request_counts": {"type": "object"}}, [*fields, "request_counts"])


def anthropic_create() -> Schema:
    item = object_({"custom_id": {"type": "string"}, "params": {"type": "object"}}, ["custom_id", "params"])
    return object_({"requests": {"type": "array", "items": item, "minItems": 1}}, ["requests"])


def native_batch() -> Schema:
    fields: dict[str, Schema] = {"id": {"type": "string"}, "status": {"type": "string"}, "model": {}}
    return object_({**fields, "requests": {"type": "object"}}, [*fields, "requests"])
