"""One question with a file, as each dialect says it."""

from __future__ import annotations

from typing import Any

from serve_app.api.anthropic.read import parse_messages_request
from serve_app.api.openai.read import parse_chat
from serve_app.api.responses.read import parse_responses
from serve_app.api.types import ModelLimits
from serve_app.tasks.text_generation.read import parse_generate

TEXT = {"type": "text", "text": "What?"}


def said(dialect: str, part: dict[str, Any], limits: ModelLimits) -> Any:
    """The content of the one message that has ``part`` and words. Raises InvalidInput."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [part, TEXT]}]}
    if dialect == "responses":
        words = {"type": "input_text", "text": "What?"}
        body = {"model": "m", "input": [{"role": "user", "content": [part, words]}]}
        return parse_responses(body, limits).generate.messages[0]["content"]
    parse = {"chat": parse_chat, "anthropic": parse_messages_request}.get(dialect)
    request = parse(body, limits) if parse else parse_generate(body, "m", limits)
    return request.messages[0]["content"]
