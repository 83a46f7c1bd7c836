"""Workers AI's asynchronous batches: bodies that submit and poll, and the answers; and our own object of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput, NotFound
from serve_app.api.fields.pages import hex_key, page_limit
from serve_app.api.fields.values import boolean, refuse

_NOT_RUN = {
    "expired": "The request could not be run before its batch expired.",
    "cancelled": "The request was not run: its batch was cancelled.",
}
# Of errors that say why a request was not run.
NOT_RUN_CODE = 3040


def batch_key(value: Any) -> str:
    """Raises `NotFound` for what no batch is called, and `InvalidInput`."""
    if not isinstance(value, str):
        raise refuse("request_id", "a string", value)
    if (key := hex_key(value, "")) is None:
        raise no_batch(value)
    return key


def no_batch(value: str) -> NotFound:
    return NotFound(f"There is no batch {value[:80]}.", param="request_id")


def queued(body: Mapping[str, Any], flag: bool) -> bool:
    """Whether a body is about a batch. ``flag``: what the query says."""
    options = body.get("options")
    named = any(body.get(name) is not None for name in ("requests", "request_id"))
    inner = isinstance(options, dict) and boolean(options, "queueRequest")
    return named or flag or bool(_flag(body)) or bool(inner)


def _flag(body: Mapping[str, Any]) -> bool | None:
    value = body.get("queueRequest")
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return boolean(dict(body), "queueRequest")


def polled(body: Mapping[str, Any]) -> str | None:
    """The batch that a body asks for. `requests` and `request_id` win over everything else in a body."""
    return None if body.get("requests") is not None or body.get("request_id") is None else batch_key(body["request_id"])


def parse_requests(body: dict[str, Any]) -> list[Any]:
    """The requests that a body submits; one that has none is a request itself."""
    listed = body.get("requests")
    if listed is None:
        return [{name: value for name, value in body.items() if name not in ("queueRequest", "options")}]
    if not isinstance(listed, list):
        raise refuse("requests", "an array of the model's inputs", listed)
    if not listed:
        raise InvalidInput("requests must hold at least one item.", param="requests")
    return listed


def estimate_asked(body: dict[str, Any]) -> bool:
    options = body.get("options")
    return isinstance(options, dict) and bool(boolean(options, "estimate"))


def parse_page(query: Mapping[str, str]) -> tuple[str, int]:
    """Cursor and size of a page of batches."""
    after = query.get("after", "")
    return (batch_key(after) if after else ""), page_limit(query, 20, 100)


def render_queued(batch_id: str, model: str, status: str = "queued") -> dict[str, Any]:
    return {"status": status, "request_id": batch_id, "model": model}


def result_line(number: int, own_id: str | None, outcome: str, body: bytes) -> bytes:
    """One of the `responses`. ``body``: the envelope that the request would have had as its answer."""
    if outcome in _NOT_RUN:
        answer: dict[str, Any] = {"errors": [{"code": NOT_RUN_CODE, "message": _NOT_RUN[outcome]}], "success": False}
        answer["result"] = {}
    else:
        answer = orjson.loads(body)
    shown = {"id": number, "result": answer.get("result"), "success": bool(answer.get("success"))}
    if not shown["success"]:
        shown["errors"] = answer.get("errors", [])
    return orjson.dumps({**shown, "external_reference": own_id}) + b"\n"


def usage(read: int, cached: int, written: int) -> dict[str, Any]:
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
