"""Results and errors as JSON: Cloudflare's envelope, and what OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import ApiError


def status_of(error: ApiError, *, native: bool) -> int:
    """The HTTP status of ``error`` on Cloudflare's own routes (``native``), or on those of other APIs."""
    return error.status if native or error.status_elsewhere is None else error.status_elsewhere


def success(result: Any, **more: Any) -> dict[str, Any]:
    """The envelope of `/ai/run` and the management routes around a result."""
    return {"result": result, "success": True, "errors": [], "messages": [], **more}


def envelope(error: ApiError) -> dict[str, Any]:
    """The envelope of an error on `/ai/run` and the management routes."""
    message = error.message if error.generic else f"AiError: {error.message}"
    return {
        "result": None if error.generic else {},
        "success": False,
        "errors": [{"code": error.code, "message": message}],
        "messages": [],
    }


def openai_body(error: ApiError) -> dict[str, Any]:
    """The error body of `/v1`: what OpenAI's clients read (``error``) and what Cloudflare-minded ones read
    (``errors``)."""
    code = error.name or str(error.code)
    detail = {"message": error.message, "type": error.type, "param": error.param, "code": code}
    return {
        "error": detail,
        "errors": [{"code": error.code, "message": error.message}],
        "success": False,
        "result": {},
        "messages": [],
    }
