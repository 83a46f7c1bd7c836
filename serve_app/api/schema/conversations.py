"""JSON Schemas of conversations. For `/openapi.json`."""

from __future__ import annotations

from serve_app.api.fields import messages
from serve_app.api.responses import conversation as conversations
from serve_app.api.schema import parts as schemas

Schema = schemas.Schema
_TEXT: Schema = {"type": "string"}
_FREE: Schema = {"type": "object"}


def _metadata() -> Schema:
    return schemas.asked_fields()["metadata"]


def _some() -> Schema:
    item = {"type": "object", "description": "A message, function_call, function_call_output or reasoning item."}
    return {"type": "array", "items": item, "maxItems": messages.MAX_MESSAGES}


def create_input() -> Schema:
    return schemas.object_({"items": _some(), "metadata": _metadata()})


def update_input() -> Schema:
    return schemas.object_({"metadata": _metadata()}, ["metadata"])


def items_input() -> Schema:
    return schemas.object_({"items": {**_some(), "minItems": 1}}, ["items"])


def conversation() -> Schema:
    fields = {"id": _TEXT, "object": {"const": "conversation"}, "created_at": {"type": "integer"}, "metadata": _FREE}
    return schemas.object_(fields, list(fields))


def deleted() -> Schema:
    fields = {"id": _TEXT, "object": {"const": "conversation.deleted"}, "deleted": {"const": True}}
    return schemas.object_(fields, list(fields))


def items() -> Schema:
    ends = {name: {"type": ["string", "null"]} for name in ("first_id", "last_id")}
    listed = {"type": "array", "items": _FREE}
    fields: Schema = {"object": {"const": "list"}, "data": listed, "has_more": {"type": "boolean"}, **ends}
    return schemas.object_(fields, list(fields))


def page_query() -> Schema:
    """Parameters of lists that are paged through."""
    return {
        "after": schemas.field("string", "The item behind which the page begins."),
        "limit": {**conversations.PAGE.schema, "default": conversations.PAGE_ITEMS},
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    }
