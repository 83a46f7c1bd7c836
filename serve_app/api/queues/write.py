"""Queues, consumers and messages as Cloudflare Queues' HTTP API shows them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.state.deferred.queues import Acknowledged, Backlog, Consumer, Message, Queue


def queue(found: Queue) -> dict[str, Any]:
    consumers = [] if found.consumer is None else [consumer(found.consumer, found.name)]
    return {
        "queue_id": found.id,
        "queue_name": found.name,
        "created_on": iso(found.created),
        "modified_on": iso(found.modified),
        "producers": [],
        "producers_total_count": 0,
        "consumers": consumers,
        "consumers_total_count": len(consumers),
        "settings": {
            "delivery_delay": found.delay_s,
            "delivery_paused": found.paused,
            "message_retention_period": found.keep_s,
        },
    }


def consumer(found: Consumer, queue_name: str) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "consumer_id": found.id,
        "created_on": iso(found.created),
        "type": found.kind,
        "queue_name": queue_name,
        "dead_letter_queue": found.dead,
        "settings": {
            "batch_size": found.batch,
            "max_retries": found.retries,
            "retry_delay": found.delay_s,
            "visibility_timeout_ms": found.lease_s * 1000,
        },
    }
    if found.model:
        shown |= {"model": found.model, "results_queue": found.results}
    return shown


def pulled(messages: Sequence[Message], backlog: Backlog) -> dict[str, Any]:
    shown = [{**_message(each), "lease_id": each.lease} for each in messages]
    return {"message_backlog_count": backlog.count, "messages": shown, "metadata": {"metrics": metrics(backlog)}}


def peeked(messages: Sequence[Message]) -> dict[str, Any]:
    return {"messages": [{**_message(each), "ref": each.id} for each in messages]}


def acknowledged(done: Acknowledged) -> dict[str, Any]:
    warnings = {lease: "This lease has ended, or never was one." for lease in done.unknown}
    return {"ackCount": done.acked, "retryCount": done.retried, "warnings": warnings}


def metrics(backlog: Backlog) -> dict[str, Any]:
    oldest = 0 if backlog.oldest is None else int(backlog.oldest * 1000)
    return {"backlog_count": backlog.count, "backlog_bytes": backlog.bytes, "oldest_message_timestamp_ms": oldest}


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _message(found: Message) -> dict[str, Any]:
    """What is no text comes as base64, JSON too."""
    body = found.body.decode() if found.kind == "text" else base64.b64encode(found.body).decode()
    return {
        "id": found.id,
        "body": body,
        "attempts": found.attempts,
        "timestamp_ms": int(found.sent * 1000),
        "metadata": {"CF-Content-Type": found.kind, "CF-sourceMessageSource": "api"},
    }
