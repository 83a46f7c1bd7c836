"""Tool calls in the text of a model, in the formats the open models were trained on; a record's ``tool_parser`` names
one. Text before a call flows on, and so do the arguments of a call, as they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serve_app.text.tool_calls.base import CallPiece, ToolParser
from serve_app.text.tool_calls.deepseek import INVOKE, SECTIONS, DeepSeek
from serve_app.text.tool_calls.glm import Glm
from serve_app.text.tool_calls.harmony import Harmony
from serve_app.text.tool_calls.kimi import Kimi
from serve_app.text.tool_calls.llama import Llama
from serve_app.text.tool_calls.marked import Hermes, Mistral

__all__ = ["PARSERS", "THOUGHT_CALLS", "CallPiece", "ToolParser"]

PARSERS: dict[str, Callable[[Sequence[dict[str, Any]]], ToolParser]] = {
    "hermes": Hermes,
    "pico": Hermes,
    "kimi": Kimi,
    "glm": Glm,
    "deepseek": DeepSeek,
    "harmony": Harmony,
    "llama3": Llama,
    "mistral": Mistral,
}

# Families that begin calls while they think: the mark of a call, and what follows it where it is one; the names of the
# request's tools where that is empty. For GLM see github.com/sgl-project/sglang, ``Glm45Detector``; for DeepSeek
# github.com/ggml-org/llama.cpp, where a section of calls ends reasoning as well.
THOUGHT_CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kimi": (Kimi.marker, ("",)),
    "glm": (Glm.marker, ()),
    "deepseek": (DeepSeek.marker, (*SECTIONS, INVOKE)),
}
