"""Whether the answer begins a turn or goes on with the last one, in the words of transformers and vLLM."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import boolean


def parse_turn(body: dict[str, Any]) -> dict[str, Any]:
    """``add_generation_prompt`` and ``continue_final_message`` where they say something else than usual, as switches of
    `text.prompt.render`. Raises `InvalidInput` where they contradict each other or the messages."""
    opens, goes_on = boolean(body, "add_generation_prompt"), boolean(body, "continue_final_message")
    if goes_on:
        if opens:
            message = "continue_final_message and add_generation_prompt exclude each other; send one of them."
            raise InvalidInput(message, param="continue_final_message")
        messages = body.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        if not isinstance(last, dict) or last.get("role") != "assistant" or not last.get("content"):
            message = "continue_final_message needs an assistant message with content as the last one."
            raise InvalidInput(message, param="continue_final_message")
        return CONTINUED
    return {} if opens is not False else {"add_generation_prompt": False}


CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
