"""JSON Schemas of the bodies about fine-tunes. For `/openapi.json`."""

from __future__ import annotations

from typing import Any

from serve_app.api.fields.lora import NAME
from serve_app.api.workers_ai.finetunes import MAX_DESCRIPTION, MAX_PAGE

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer", "minimum": 0}


def new_finetune() -> Schema:
    fields = {
        "model": {**_TEXT, "description": "The base model."},
        "name": {**_TEXT, "pattern": f"^{NAME}$"},
        "description": {**_TEXT, "maxLength": MAX_DESCRIPTION},
        "public": {"type": "boolean", "default": False, "description": "Whether all accounts may use it."},
    }
    return {"type": "object", "properties": fields, "required": ["model", "name"]}


def changes() -> Schema:
    fields = {name: new_finetune()["properties"][name] for name in ("description", "public")}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def finetune() -> Schema:
    files = {"type": "array", "items": _TEXT}
    upload = {"type": "object", "properties": {"version": _NUMBER, "missing": files, "problem": _TEXT}}
    fields: Schema = {
        **{name: _TEXT for name in ("id", "model", "name", "description", "created_at", "modified_at", "digest")},
        "public": {"type": "boolean"},
        "status": {"type": "string", "enum": ["waiting", "refused", "ready"]},
        **{name: _NUMBER for name in ("version", "rank", "size")},
        "upload": {"anyOf": [upload, {"type": "null"}]},
    }
    return {"type": "object", "properties": fields, "required": ["id", "model", "name", "created_at", "modified_at"]}


def asset() -> Schema:
    fields = {
        "file_name": {"type": "string", "enum": ["adapter_config.json", "adapter_model.safetensors"]},
        "file": {"type": "string", "format": "binary"},
    }
    return {"type": "object", "properties": fields, "required": ["file_name", "file"]}


def public_query() -> Schema:
    return {
        "limit": {"type": "integer", "minimum": 0, "maximum": MAX_PAGE},
        "offset": {"type": "integer", "minimum": 0},
        "orderBy": {"type": "string", "enum": ["created_at", "modified_at", "name"]},
    }
