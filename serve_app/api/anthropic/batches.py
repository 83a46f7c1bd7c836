"""Anthropic's message batches: the object, and the lines of results."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from serve_app.api.errors import NotFound
from serve_app.api.fields.pages import hex_key, page_ends, page_limit

MAX_PAGE = 1000
# Anthropic's words for how a request ended.
_NOT_RUN = {"expired": "expired", "cancelled": "canceled"}


def batch_key(value: str) -> str:
    """What stands in the store of a batch's id. Raises `NotFound`."""
    if (key := hex_key(value, "msgbatch_")) is None:
        raise no_batch(value)
    return key


def no_batch(value: str) -> NotFound:
    return NotFound(f"There is no message batch {value[:80]}.", param="message_batch_id")


def render_batch(
    batch_id: str,
    *,
    status: str,
    counts: Mapping[str, int],
    created: float,
    expires: float,
    ended: float | None,
    cancelling: float | None,
    results_url: str,
) -> dict[str, Any]:
    """``counts``: by Anthropic's names. ``results_url``: of one that has ended."""
    over = ended is not None
    return {
        "id": f"msgbatch_{batch_id}",
        "type": "message_batch",
        "processing_status": "ended" if over else "canceling" if cancelling is not None else "in_progress",
        "request_counts": dict(counts),
        "created_at": _time(created),
        "expires_at": _time(expires),
        "ended_at": _time(ended),
        "cancel_initiated_at": _time(cancelling),
        "archived_at": None,
        "results_url": results_url if over else None,
    }


def render_deleted(batch_id: str) -> dict[str, Any]:
    return {"id": f"msgbatch_{batch_id}", "type": "message_batch_deleted"}


def result_line(own_id: str, outcome: str, body: bytes) -> bytes:
    """``body``: the message, or the dialect's error."""
    named = orjson.dumps({"custom_id": own_id})[:-1]
    if outcome in _NOT_RUN:
        return named + b',"result":{"type":"' + _NOT_RUN[outcome].encode() + b'"}}\n'
    kind, name = (b"succeeded", b"message") if outcome == "succeeded" else (b"errored", b"error")
    return named + b',"result":{"type":"' + kind + b'","' + name + b'":' + body + b"}}\n"


def _time(at: float | None) -> str | None:
    return (
        None
        if at is None
        else datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    )


def parse_page(query: Mapping[str, str]) -> tuple[str, str, int]:
    """The batch behind which to begin, the one in front of which to end, and how many. Raises `InvalidInput`."""
    limit = page_limit(query, 20, MAX_PAGE)
    after, before = (batch_key(named) if (named := query.get(name, "")) else "" for name in ("after_id", "before_id"))
    return after, before, limit


def render_list(found: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {"data": found, "has_more": more, **page_ends(found)}
