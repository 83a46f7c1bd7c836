"""How much a model should say to itself before it answers: dialects' fields as variables of chat templates.

Templates differ in names: `enable_thinking` (Qwen3, GLM), `thinking` (Granite, DeepSeek V3.1), `reasoning_effort`
(gpt-oss); each ignores those it does not know. Clients may set these variables only: arbitrary ones have hung servers
(vLLM CVE-2025-61620).
"""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.turn import parse_turn
from serve_app.api.fields.values import refuse

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking", "clear_thinking", "low_effort", "force_nonempty_content")


def parse_thinking(body: dict[str, Any], effort: Any = None) -> dict[str, Any]:
    """The template variables that a body asks for: ``effort`` (`reasoning_effort`, or where the dialect has it), and
    `chat_template_kwargs` over it; and how the turn begins."""
    return {**_of_effort(effort), **_kwargs(body.get("chat_template_kwargs")), **parse_turn(body)}


def switched(on: bool) -> dict[str, Any]:
    return {"enable_thinking": on, "thinking": on}


def _of_effort(effort: Any) -> dict[str, Any]:
    if effort is None:
        return {}
    if effort not in EFFORTS:
        listed = ", ".join(f'"{name}"' for name in EFFORTS)
        raise InvalidInput(f"reasoning_effort must be one of {listed}.", param="reasoning_effort")
    return switched(False) if effort == "none" else {**switched(True), "reasoning_effort": effort}


def _kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse("chat_template_kwargs", "an object", value)
    for name, item in value.items():
        known = isinstance(item, bool) if name in SWITCHES else name == "reasoning_effort" and item in EFFORTS
        if not known:
            allowed = ", ".join(SWITCHES)
            message = f"chat_template_kwargs may hold true or false for {allowed}, and reasoning_effort, nothing else."
            raise InvalidInput(message, param="chat_template_kwargs")
    return dict(value)
