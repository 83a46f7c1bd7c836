"""Tool calls in the text of a model, in the formats the open models were trained on; a record's ``tool_parser`` names
one. Text before a call flows on, and so do the arguments of a call, as they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serve_app.text.tool_calls.base import CallPiece, ToolParser
from serve_app.text.tool_calls.harmony import Harmony
from serve_app.text.tool_calls.kimi import Kimi
from serve_app.text.tool_calls.llama import Llama
from serve_app.text.tool_calls.marked import Hermes, Mistral

__all__ = ["PARSERS", "CallPiece", "ToolParser"]

PARSERS: dict[str, Callable[[Sequence[dict[str, Any]]], ToolParser]] = {
    "hermes": Hermes,
    "pico": Hermes,
    "kimi": Kimi,
    "harmony": Harmony,
    "llama3": Llama,
    "mistral": Mistral,
}
