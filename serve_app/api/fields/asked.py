"""How a request asks to be treated, in its body and in its headers: where to run, how long to wait, in which tier.

Names: Cloudflare's `options`, `x-session-affinity` and `cf-aig-request-timeout`; OpenAI's `prompt_cache_key`,
`service_tier` and `metadata`; our own `resumable` and `estimate` in `options`, and `x-resumable` and `x-estimate`. None
of them is a claim of identity or priority: those come from the key alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import DEADLINE_MS, RESUMABLE_S
from serve_app.api.fields.values import boolean, refuse, string, text
from serve_app.api.types import TaskRequest

MAX_METADATA = 16
MAX_SESSION_CHARS = 512
ESTIMATE = "x-estimate"
_SESSION_HEADERS = ("x-session-affinity", "cf-aig-session-id")

_Request = TypeVar("_Request", bound=TaskRequest)


def parse_asked(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of `types.TaskRequest` that ``body`` sets, as keyword arguments."""
    options = body.get("options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise refuse("options", "an object", options)
    tier = string(body, "service_tier", limit=64)
    return {
        "reject_if_busy": bool(boolean(options, "rejectIfBusy")),
        "deadline_s": _deadline(options),
        "resumable_s": RESUMABLE_S.read(options, "resumable"),
        "estimate": bool(boolean(options, "estimate")),
        "session": string(body, "prompt_cache_key", limit=MAX_SESSION_CHARS) or None,
        "service_tier": None if tier in ("", "auto", "default") else tier,
        "metadata": parse_metadata(body.get("metadata")),
    }


def with_headers(request: _Request, headers: Mapping[str, str]) -> _Request:
    """``request`` with what its headers ask for. They are hints: what cannot be read is left out, and what the body
    says about time stands."""
    session = _session_in(headers)
    timeout = headers.get("cf-aig-request-timeout", "").strip()
    changes: dict[str, Any] = {}
    if session:
        changes["session"] = session
    if request.deadline_s is None and timeout.isascii() and timeout.isdigit():
        milliseconds = min(int(timeout[:12]), int(DEADLINE_MS.high))
        if milliseconds:
            changes["deadline_s"] = milliseconds / 1000
    resumable = headers.get("x-resumable", "").strip()
    if request.resumable_s is None and resumable.isascii() and resumable.isdigit():
        changes["resumable_s"] = min(float(resumable[:12]), RESUMABLE_S.high) or None
    if request.answers:
        changes["accept"] = headers.get("accept", "")[:256].lower()
    if headers.get(ESTIMATE, "").strip().lower() in ("true", "1"):
        changes["estimate"] = True
    return replace(request, **changes) if changes else request


def session_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """The session that a request will have, "" for none: before anything else of it is read, and checked."""
    said = body.get("prompt_cache_key")
    return _session_in(headers) or (said[:MAX_SESSION_CHARS] if isinstance(said, str) else "")


def _session_in(headers: Mapping[str, str]) -> str:
    found = (value for name in _SESSION_HEADERS if (value := headers.get(name, "").strip()))
    return next(found, "")[:MAX_SESSION_CHARS]


def parse_metadata(value: Any) -> dict[str, str]:
    """Up to 16 strings that belong to the client; numbers and booleans become strings, null counts as left out."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse("metadata", "an object of strings", value)
    if len(value) > MAX_METADATA:
        raise InvalidInput(f"metadata must have at most {MAX_METADATA} entries, got {len(value)}.", param="metadata")
    found = {}
    for key, item in value.items():
        shown = json.dumps(item) if isinstance(item, (bool, int, float)) else item
        if shown is not None:
            found[text(key, "metadata", limit=64)] = text(shown, f"metadata.{key}"[:80], limit=512)
    return found


def _deadline(options: dict[str, Any]) -> float | None:
    """Seconds, from ``deadlineMs`` or from where Cloudflare's binding has its time limit."""
    asked = DEADLINE_MS.read(options, "deadlineMs")
    if asked is None and isinstance(options.get("gateway"), dict):
        asked = DEADLINE_MS.read(options["gateway"], "requestTimeoutMs")
    return None if asked is None else asked / 1000
