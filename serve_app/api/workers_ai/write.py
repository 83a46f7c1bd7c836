"""What native answers of several tasks share. What each task answers lies in its folder."""

from __future__ import annotations

from typing import Any

from serve_app.api.receipt import receipt
from serve_app.api.types import Usage


def ranked(scores: list[float], top_k: int | None) -> list[dict[str, Any]]:
    """``scores`` with their places, best first, cut to ``top_k``."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [{"id": i, "score": scores[i]} for i in order[:top_k]]


def input_usage(usage: Usage) -> dict[str, Any]:
    """Usage of a task that reads tokens and writes none."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": usage.prompt_tokens,
        **receipt(usage),
    }
