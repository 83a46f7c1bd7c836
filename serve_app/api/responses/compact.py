"""Compaction: a conversation made short, `POST /v1/responses/compact`.

The answer holds what users said as it was, and an item with the model's summary of everything. That item is sent back
in ``input``, where it stands for what was left out.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from typing import Any

import orjson

from serve_app.api import identity
from serve_app.api.collect import collect
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import text
from serve_app.api.responses.items import input_parts, item_id, usage_json
from serve_app.api.types import Event

ASK = (
    "Summarise our conversation so far for somebody who has to go on with it and has nothing but your summary: what "
    "was asked, what was found out and decided, names and numbers that matter, and what is still open. Write the "
    "summary only."
)
MAX_SUMMARY_CHARS = 1 << 20


def to_summarise(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the request for a summary as its last turn. Raises `InvalidInput` if nothing was said."""
    if not any(message["role"] != "system" for message in messages):
        raise InvalidInput("There is nothing to compact; send input or previous_response_id.", param="input")
    return [*messages, {"role": "user", "content": ASK}]


def render_compaction(messages: list[dict[str, Any]], events: Iterable[Event]) -> dict[str, Any]:
    """The answer, from the conversation and the events of its summary."""
    choices, usage = collect(events)
    response_id = f"resp_{identity.answer_id()}"
    output: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user":
            head = {"id": item_id("msg", response_id, len(output)), "type": "message", "status": "completed"}
            output.append({**head, "role": "user", "content": input_parts(message["content"])})
    packed = base64.b64encode(orjson.dumps({"summary": choices[0].text})).decode()
    head = {"id": item_id("cmp", response_id, len(output)), "type": "compaction"}
    return {
        "id": response_id,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*output, {**head, "encrypted_content": packed}],
        "usage": usage_json(usage),
    }


def summary_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """A compaction item of `input` as the message it stands for."""
    packed = text(item.get("encrypted_content"), f"{where}.encrypted_content", limit=2 * MAX_SUMMARY_CHARS)
    try:
        summary = orjson.loads(base64.b64decode(packed, validate=True))["summary"]
    except (ValueError, TypeError, KeyError):
        message = f"{where}.encrypted_content is not of this server; compact the conversation here."
        raise InvalidInput(message, param=f"{where}.encrypted_content") from None
    said = text(summary, f"{where}.encrypted_content", limit=MAX_SUMMARY_CHARS)
    return {"role": "assistant", "content": f"Summary of our conversation so far:\n{said}"}
