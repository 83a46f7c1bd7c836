"""What native bodies of all tasks share: `/ai/run/{model}` and `/ai/run`. What each task reads lies in its folder."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.body import as_object
from serve_app.api.fields.values import objects, refuse, string, text

# Cloudflare's schema stops at 100 texts; its own AI SDK provider sends up to 3000.
MAX_TEXTS = 4096
MAX_CONTEXTS = 4096


def parse_run_target(body: bytes | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The generic form `POST /ai/run` with ``{model, input, options}``: the model's name and the input to
    parse for its task."""
    outer = as_object(body)
    model = string(outer, "model", limit=512)
    if not model:
        raise InvalidInput('model is missing; send {"model": "@cf/...", "input": {...}}.', param="model")
    inputs = outer.get("input")
    if not isinstance(inputs, dict):
        raise refuse("input", "an object with the model's inputs", inputs)
    inner = dict(inputs)
    if outer.get("options") is not None:
        inner.setdefault("options", outer["options"])
    return model, inner


def open_native(body: bytes | dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs, and how the request asks to be treated."""
    body = as_object(body)
    asked = parse_asked(body)
    for name in ("requests", "request_id"):
        if body.get(name) is not None:
            raise InvalidInput(f"{name} belongs to batches, of which this can't be one.", param=name)
    return body, asked


def parse_contexts(value: Any) -> list[str]:
    """The texts of ``[{text}]``, at least one."""
    found = objects(value, "contexts", limit=MAX_CONTEXTS)
    if not found:
        raise InvalidInput("contexts must hold at least one item.", param="contexts")
    return [text(item.get("text"), f"contexts[{i}].text") for i, item in enumerate(found)]
