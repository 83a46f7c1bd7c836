"""JSON Schemas of the bodies about queues and subscriptions to events. For `/openapi.json`."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
# Examples.
MESSAGE = {"body": {"prompt": "Hello"}, "content_type": "json"}
CONSUMER = {"type": "http_pull", "settings": {"batch_size": 10, "max_retries": 3}}
SUBSCRIPTION = {
    "name": "batches",
    "source": {"type": "workersAi.model"},
    "destination": {"type": "queues.queue", "queue_id": "0" * 32},
    "events": ["batch.succeeded"],
}
_LEASES: Schema = {"type": "array", "maxItems": 100, "items": {"type": "object"}}
_SECONDS: Schema = {"type": "number", "minimum": 0, "maximum": 86_400}


def _object(required: list[str] | None = None, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": required or []}


def queue_input() -> Schema:
    kept = {"type": "number", "minimum": 60, "maximum": 1_209_600}
    settings = _object(delivery_delay=_SECONDS, delivery_paused={"type": "boolean"}, message_retention_period=kept)
    return _object(queue_name={"type": "string", "pattern": "^[A-Za-z0-9_-]{1,63}$"}, settings=settings)


def new_queue_input() -> Schema:
    return {**queue_input(), "required": ["queue_name"]}


def consumer_input() -> Schema:
    settings = _object(
        batch_size={"type": "integer", "minimum": 1, "maximum": 100},
        max_retries={"type": "integer", "minimum": 0, "maximum": 100},
        retry_delay=_SECONDS,
        visibility_timeout_ms={"type": "number", "minimum": 0, "maximum": 43_200_000},
    )
    text: Schema = {"type": "string"}
    kind: Schema = {"enum": ["http_pull", "workers_ai"]}
    return _object(["type"], type=kind, dead_letter_queue=text, model=text, results_queue=text, settings=settings)


def message_input() -> Schema:
    return _object(["body"], body={}, content_type={"enum": ["text", "json"]}, delay_seconds=_SECONDS)


def messages_input() -> Schema:
    listed = {"type": "array", "minItems": 1, "maxItems": 100, "items": message_input()}
    return _object(["messages"], messages=listed, delay_seconds=_SECONDS)


def pull_input() -> Schema:
    lease: Schema = {"type": "number", "minimum": 0, "maximum": 43_200_000}
    return _object(batch_size={"type": "integer", "minimum": 1, "maximum": 100}, visibility_timeout_ms=lease)


def ack_input() -> Schema:
    return _object(acks=_LEASES, retries=_LEASES)


def refs_input() -> Schema:
    return _object(["refs"], refs=_LEASES)


def purge_input() -> Schema:
    return _object(["delete_messages_permanently"], delete_messages_permanently={"const": True})


def subscription_input() -> Schema:
    listed: Schema = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    source, destination = {"type": "object"}, {"type": "object"}
    text, flag = {"type": "string", "maxLength": 120}, {"type": "boolean"}
    return _object(name=text, enabled=flag, events=listed, source=source, destination=destination)
