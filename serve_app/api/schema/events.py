"""JSON Schemas of the bodies about webhooks and other subscriptions to events. For `/openapi.json`."""

from __future__ import annotations

from typing import Any

from serve_app.api.schema.dialects import enveloped

Schema = dict[str, Any]
# An example.
WEBHOOK = {"url": "https://example.com/hook", "events": ["batch.*"]}
_EVENTS: Schema = {"type": "array", "minItems": 1, "maxItems": 32, "items": {"type": "string"}}


def webhook_input() -> Schema:
    fields = {
        "url": {"type": "string", "format": "uri"},
        "events": _EVENTS,
        "name": {"type": "string", "maxLength": 120},
        "model": {"type": "string"},
        "enabled": {"type": "boolean"},
    }
    return {"type": "object", "properties": fields, "required": ["url", "events"]}


def replay_input() -> Schema:
    fields = {
        "delivery": {"type": "string"},
        "since": {"type": "string", "format": "date-time"},
        "all": {"type": "boolean"},
    }
    return {"type": "object", "properties": fields}


def replay_answer() -> Schema:
    return enveloped({"type": "object", "properties": {"replayed": {"type": "integer"}}})
