"""The OpenAPI 3.1 document of the routes: pure, from what each route says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.api.schema.dialects import error_envelope

Schema = dict[str, Any]

_EXAMPLES = {"model": "@cf/pico/pico-instruct", "gateway": "default"}
# What every route with a key may answer besides success; a test holds the routes to it.
ERRORS = {
    400: "The input is not right; the message says what is.",
    401: "No valid API key.",
    403: "The key belongs to another account, or lacks a scope.",
    404: "No such route or thing.",
    405: "Another method, or something the model cannot do.",
    408: "The body did not arrive in time.",
    409: "There is one of this name already, or it is under way.",
    413: "The body, or the prompt with its answer, is too large.",
    415: "The body is packed in another way than gzip.",
    416: "The file does not have this range of bytes.",
    429: "No room at the moment, or over the rate limit; Retry-After says when to try again.",
    431: "The headers are too large.",
    500: "A failure of the server; the log has the cause under the id in cf-ray.",
    503: "The model is still loading; Retry-After says when to try again.",
}


@dataclass(slots=True, frozen=True)
class Operation:
    """What a route does, takes and answers; its body is of ``body_type``. ``streams``: it also answers streams, of
    ``stream_type``. ``fails``: errors of a route that asks for no key.
    """

    summary: str
    tag: str
    answer: Schema = field(default_factory=lambda: {"type": "object"})
    body: Schema | None = None
    example: Mapping[str, Any] | str | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    streams: bool = False
    media_type: str = "application/json"
    stream_type: str = "text/event-stream"
    body_type: str = "application/json"
    fails: tuple[int, ...] = ()


def document(
    operations: Iterable[tuple[str, str, Operation, bool]], version: str, account: str = "local"
) -> dict[str, Any]:
    """The document for (method, path as Starlette writes it, operation, whether a key is needed).

    ``account`` is the one that paths must name.
    """
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation, needs_key in operations:
        plain = re.sub(r":\w+\}", "}", path)
        paths.setdefault(plain, {})[method.lower()] = _operation(method, plain, operation, needs_key, account)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "serve-app",
            "version": version,
            "description": "A self-hosted Workers AI, with the OpenAI and Anthropic APIs beside its own.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": error_envelope()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(method: str, path: str, operation: Operation, needs_key: bool, account: str) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": operation.answer}}
    if operation.streams:
        content[operation.stream_type] = {}
    out: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": _parameters(path, operation, account),
        "responses": {"200": {"description": "Success.", "content": content}},
        "security": [{"bearer": []}, {"x-api-key": []}] if needs_key else [],
    }
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    fails = ERRORS if needs_key else {status: ERRORS[status] for status in operation.fails}
    out["responses"] |= {str(status): {"description": text, **error} for status, text in fails.items()}
    if operation.body is not None:
        media: dict[str, Any] = {"schema": operation.body}
        if operation.example is not None:
            media["example"] = operation.example if isinstance(operation.example, str) else dict(operation.example)
        out["requestBody"] = {"required": True, "content": {operation.body_type: media}}
    return out


def _example(name: str) -> Schema:
    return {"example": _EXAMPLES[name]} if name in _EXAMPLES else {}


def _parameters(path: str, operation: Operation, account: str) -> list[dict[str, Any]]:
    known = {"account": {"type": "string", "enum": [account]}}
    inside = [
        {"name": name, "in": "path", "required": True, "schema": known.get(name, {"type": "string"}), **_example(name)}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    asked = [
        {"name": name, "in": "query", "schema": schema, **_example(name)} for name, schema in operation.query.items()
    ]
    return [*inside, *asked]
