"""The native answer of reranking."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from serve_app.api.envelopes import success
from serve_app.api.types import RerankRequest, Usage
from serve_app.api.workers_ai.write import input_usage, ranked


def render_rerank(request: RerankRequest, scores: Iterable[float], usage: Usage) -> dict[str, Any]:
    """``scores`` in the order of the contexts; the answer is sorted, best first, and cut to ``top_k``."""
    return success({"response": ranked([float(score) for score in scores], request.top_k), "usage": input_usage(usage)})
