"""The native body of reranking."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import BEST
from serve_app.api.fields.values import string
from serve_app.api.types import RerankRequest
from serve_app.api.workers_ai.read import open_native, parse_contexts


def parse_rerank(body: bytes | dict[str, Any], model: str) -> RerankRequest:
    """``{query, contexts: [{text}], top_k}``."""
    body, asked = open_native(body)
    query = string(body, "query")
    if not query:
        raise InvalidInput(
            "Input does not match the model's schema: required: query (a non-empty string).", param="query"
        )
    if body.get("contexts") is None:
        raise InvalidInput(
            "Input does not match the model's schema: required: contexts (an array of {text}).",
            param="contexts",
        )
    contexts = parse_contexts(body["contexts"])
    return RerankRequest(model, query, contexts, BEST.read(body, "top_k"), **asked)
