"""Writing rerankers' dialects. What Cohere, Jina and vLLM each call their own stands side by side in one answer."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable
from typing import Any

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import ApiError
from serve_app.api.receipt import receipt
from serve_app.api.types import RerankRequest, Usage

# Cohere counts a query with up to so many documents as one.
DOCUMENTS_PER_UNIT = 100


def render_results(
    request: RerankRequest, scores: Iterable[float], usage: Usage, *, documents: bool, version: str
) -> dict[str, Any]:
    """Best first, cut to ``top_k``. ``version``: of Cohere's API, whose path was asked."""
    results = []
    for index, score in _ordered(scores)[: request.top_k]:
        shown = {"document": {"text": request.contexts[index]}} if documents else {}
        results.append({"index": index, "relevance_score": score, **shown})
    return {
        "id": str(uuid.uuid4()),
        "object": "list",
        "model": request.model,
        "results": results,
        "usage": _usage(usage),
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"search_units": math.ceil(len(request.contexts) / DOCUMENTS_PER_UNIT)},
            "tokens": {"input_tokens": usage.prompt_tokens, "output_tokens": 0},
        },
    }


def render_ranks(request: RerankRequest, scores: Iterable[float], *, texts: bool) -> list[dict[str, Any]]:
    """TEI's answer: an array, best first."""
    shown = [{"text": context} if texts else {} for context in request.contexts]
    return [{"index": index, "score": score, **shown[index]} for index, score in _ordered(scores)]


def render_scores(request: RerankRequest, scores: Iterable[float], usage: Usage) -> dict[str, Any]:
    """vLLM's answer: one score a pair, in their order."""
    data = [{"index": i, "object": "score", "score": float(score)} for i, score in enumerate(scores)]
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model,
        "data": data,
        "usage": {**_usage(usage), "completion_tokens": 0, "prompt_tokens_details": None},
    }


def error_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's body, with the message also where clients of Cohere (``message``) and of Jina (``detail``) look."""
    return {"message": error.message, "detail": error.message, **openai_body(error)}


def _ordered(scores: Iterable[float]) -> list[tuple[int, float]]:
    return sorted(enumerate(float(score) for score in scores), key=lambda pair: -pair[1])


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        **receipt(usage),
    }
