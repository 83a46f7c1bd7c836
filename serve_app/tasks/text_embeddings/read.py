"""The native body of text embeddings, bge-m3's forms among them."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import WEIGHT
from serve_app.api.fields.shorten import parse_shorten
from serve_app.api.fields.values import boolean, choice, string, texts
from serve_app.api.multi_vector import MODES, WEIGHTS
from serve_app.api.types import EmbedRequest
from serve_app.api.workers_ai.read import MAX_TEXTS, open_native, parse_contexts

_ROLES = {"text": None, "queries": "query", "documents": "document"}


def parse_embed(body: bytes | dict[str, Any], model: str) -> EmbedRequest:
    """``{text}``, with Qwen3-Embedding ``{queries}`` or ``{documents}``, or the forms of bge-m3: ``{contexts}``
    (vectors) and ``{query, contexts}`` (scores)."""
    body, asked = open_native(body)
    pooling = choice(body, "pooling", ("mean", "cls"))
    asked |= _readings(body) | {"shorten": parse_shorten(body), "instruction": string(body, "instruction") or ""}
    if body.get("contexts") is not None:
        found = parse_contexts(body["contexts"])
        query = string(body, "query")
        if query:
            mode = choice(body, "score_mode", MODES) or "dense"
            asked |= {"score_mode": mode, "score_weights": _weights(body.get("score_weights")), "return_dense": True}
            asked["heads"] = {"all": ("sparse", "colbert"), "dense": ()}.get(mode, (mode,))
            return EmbedRequest(model, [query, *found], pooling, form="scores", **asked)  # type: ignore[arg-type]
        asked["role"] = "document"
        return EmbedRequest(model, found, pooling, form="contexts", **asked)  # type: ignore[arg-type]
    given = [name for name in _ROLES if body.get(name) is not None]
    if len(given) > 1:
        raise InvalidInput(f"Send {' or '.join(given)}, one at a time.", param=given[1])
    name = given[0] if given else "text"
    value = body.get(name)
    if value is None:
        raise InvalidInput(
            "Input does not match the model's schema: required: text (a string or an array of strings).",
            param="text",
        )
    found = texts(value, name, limit=MAX_TEXTS)
    if not all(found):
        raise InvalidInput(f"{name} must not be empty.", param=name)
    asked["role"] = _ROLES[name]
    return EmbedRequest(model, found, pooling, **asked)  # type: ignore[arg-type]


def _readings(body: dict[str, Any]) -> dict[str, Any]:
    """What to return of each text, in FlagEmbedding's words; the dense vector unless told otherwise."""
    flags = (("sparse", "return_sparse"), ("colbert", "return_colbert_vecs"))
    heads = tuple(head for head, name in flags if boolean(body, name))
    dense = boolean(body, "return_dense") is not False
    if not dense and not heads:
        raise InvalidInput(
            "return_dense is false and nothing else is asked for; set one to true.", param="return_dense"
        )
    return {"heads": heads, "return_dense": dense}


def _weights(value: Any) -> tuple[float, ...]:
    if value is None:
        return WEIGHTS
    named = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) and len(value) == 3 else {}
    found = [WEIGHT.read(named, key) for key in named]
    if len(found) != 3 or any(item is None for item in found) or not sum(item or 0.0 for item in found):
        message = "score_weights must be three numbers, not all 0: of the dense, sparse and colbert scores."
        raise InvalidInput(message, param="score_weights")
    return tuple(item or 0.0 for item in found)
