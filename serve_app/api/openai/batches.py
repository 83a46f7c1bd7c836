"""OpenAI's batches and files: bodies that make them, the objects, and the lines of output files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput, NotFound
from serve_app.api.fields.asked import parse_metadata
from serve_app.api.fields.pages import hex_key, page_ends, page_limit
from serve_app.api.fields.values import refuse, string, text

MIN_KEPT_S, MAX_KEPT_S = 3600, 2_592_000
MAX_NAME = 255
# What OpenAI calls a batch's states.
_STATUS = {"queued": "in_progress", "running": "in_progress"}
_TIMES = ("in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
          "cancelled_at")  # fmt: skip
NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: its batch was cancelled."),
}


def parse_create(body: dict[str, Any], endpoints: Collection[str]) -> dict[str, Any]:
    """The body of `POST /v1/batches`: ``file``, ``endpoint``, ``window``, ``metadata`` and ``kept_s`` (None where
    nothing is said). Raises `InvalidInput`.
    """
    file = string(body, "input_file_id", limit=128)
    if not file:
        raise InvalidInput("input_file_id is missing; upload a file to /v1/files first.", param="input_file_id")
    endpoint = string(body, "endpoint", limit=128)
    if endpoint not in endpoints:
        raise InvalidInput(f"endpoint must be one of {', '.join(endpoints)}.", param="endpoint")
    window = string(body, "completion_window", limit=16)
    if window != "24h":
        raise InvalidInput('completion_window must be "24h".', param="completion_window")
    return {
        "file": file,
        "endpoint": endpoint,
        "window": window,
        "metadata": parse_metadata(body.get("metadata")),
        "kept_s": parse_kept(body.get("output_expires_after"), "output_expires_after"),
    }


def parse_kept(value: Any, name: str) -> float | None:
    """``{"anchor": "created_at", "seconds": n}`` as seconds."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("anchor", "created_at") != "created_at":
        raise refuse(name, '{"anchor": "created_at", "seconds": ...}', value)
    seconds = value.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():  # of a form
        seconds = int(seconds[:12])
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_KEPT_S <= seconds <= MAX_KEPT_S:
        message = f"{name}.seconds must be an integer from {MIN_KEPT_S} to {MAX_KEPT_S}."
        raise InvalidInput(message, param=f"{name}.seconds")
    return float(seconds)


def parse_upload(fields: Mapping[str, str]) -> tuple[str, float | None]:
    """Purpose and seconds of a file's form. Raises `InvalidInput`."""
    purpose = fields.get("purpose", "")
    if purpose != "batch":
        raise InvalidInput('purpose must be "batch"; files for anything else are not kept here.', param="purpose")
    expires = {name: fields[key] for name in ("anchor", "seconds") if (key := f"expires_after[{name}]") in fields}
    return purpose, parse_kept(expires or None, "expires_after")


def file_name(value: str) -> str:
    return text(value, "file", limit=MAX_NAME) or "upload"


def no_file(value: str) -> NotFound:
    return NotFound(f"No such File object: {value[:80]}", param="id")


def batch_key(value: str) -> str:
    """What stands in the store of a batch's id. Raises `NotFound`."""
    if (key := hex_key(value, "batch_")) is None:
        raise no_batch(value)
    return key


def no_batch(value: str) -> NotFound:
    return NotFound(f"No batch found with id '{value[:80]}'.", param="id")


def render_file(
    file_id: str, *, size: int, created: float, name: str, purpose: str, expires: float | None
) -> dict[str, Any]:
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": int(created),
        "expires_at": None if expires is None else int(expires),
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def render_deleted(file_id: str) -> dict[str, Any]:
    return {"id": file_id, "object": "file", "deleted": True}


def render_batch(
    batch_id: str,
    *,
    status: str,
    about: Mapping[str, Any],
    problems: list[dict[str, Any]],
    counts: tuple[int, int, int],
    usage: tuple[int, int, int],
    created: float,
    times: Mapping[str, float | None],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """``counts``: total, completed, failed. ``usage``: input, cached and output tokens. ``times``: by the names of the
    object's fields; ``more``: fields of ours.
    """
    read, cached, written = usage
    return {
        "id": f"batch_{batch_id}",
        "object": "batch",
        "endpoint": about["endpoint"],
        "model": about.get("model"),
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": about["input_file_id"],
        "completion_window": about["completion_window"],
        "status": _STATUS.get(status, status),
        "output_file_id": about.get("output_file_id"),
        "error_file_id": about.get("error_file_id"),
        "created_at": int(created),
        **{name: None if (at := times.get(name)) is None else int(at) for name in _TIMES},
        "request_counts": dict(zip(("total", "completed", "failed"), counts, strict=True)),
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
        "metadata": about.get("metadata") or None,
        **more,
    }


def result_line(
    batch_id: str, number: int, own_id: str, outcome: str, status: int, request_id: str, body: bytes
) -> bytes:
    """One line of an output or error file. ``body`` is spliced in as it is."""
    named = orjson.dumps({"id": f"batch_req_{batch_id[:24]}{number:08x}", "custom_id": own_id})[:-1]
    if outcome in NOT_RUN:
        code, message = NOT_RUN[outcome]
        return named + b',"response":null,"error":' + orjson.dumps({"code": code, "message": message}) + b"}\n"
    head = orjson.dumps({"status_code": status, "request_id": request_id})[:-1]
    return named + b',"response":' + head + b',"body":' + body + b'},"error":null}\n'


def file_key(value: str) -> str:
    """What stands in the store of a file's id. Raises `NotFound`."""
    if (key := hex_key(value, "file-")) is None:
        raise no_file(value)
    return key


def parse_files_page(query: Mapping[str, str]) -> tuple[str, str, int, bool]:
    """Purpose, the file behind which to begin, how many, and whether the oldest come first. Raises `InvalidInput`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput('order must be "asc" or "desc".', param="order")
    after = query.get("after", "")
    return query.get("purpose", ""), file_key(after) if after else "", page_limit(query, 10_000, 10_000), order == "asc"


def parse_batches_page(query: Mapping[str, str]) -> tuple[str, int]:
    """The batch behind which to begin, and how many."""
    after = query.get("after", "")
    return batch_key(after) if after else "", page_limit(query, 20, 100)


def render_list(found: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {"object": "list", "data": found, **page_ends(found), "has_more": more}
