"""JSON Schemas of the rerankers' dialects."""

from __future__ import annotations

from serve_app.api.fields import ranges
from serve_app.api.schema.parts import Schema, field, object_, ranged, shorten_fields
from serve_app.api.workers_ai.read import MAX_CONTEXTS

_TEXT: Schema = {"type": "string"}
_MODEL: Schema = field("string", "A reranker; may be left out where only one is served.", minLength=1, maxLength=512)
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _many(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_CONTEXTS}


def rerank_input() -> Schema:
    document = {"anyOf": [_TEXT, object_({"text": _TEXT}, ["text"])]}
    query = field("string", "What the documents are ranked for.", minLength=1)
    common = {"model": _MODEL, "query": query, **shorten_fields()}
    documents = {
        **common,
        "documents": _many(document),
        "top_n": ranged(ranges.RANKED, "Returns only this many of the best; 0 all."),
        "return_documents": field("boolean", "Whether the answer repeats the documents."),
        "rank_fields": field("array", "The fields of documents to read.", items=_TEXT, maxItems=64),
        "max_tokens_per_doc": ranged(ranges.DOCUMENT_TOKENS, "Cuts documents to this many tokens."),
    }
    tei = {
        **common,
        "texts": _many(_TEXT),
        "return_text": field("boolean", "Whether the answer repeats the texts."),
        "raw_scores": field("boolean", "Logits instead of scores between 0 and 1."),
        "truncation_direction": {"type": "string", "enum": ["left", "right", "Left", "Right"]},
    }
    return {"anyOf": [object_(documents, ["query", "documents"]), object_(tei, ["query", "texts"])]}


def rerank_output() -> Schema:
    result = object_({"index": _COUNT, "relevance_score": {"type": "number"}}, ["index", "relevance_score"])
    answer = object_({"id": _TEXT, "results": {"type": "array", "items": result}}, ["id", "results"])
    rank = object_({"index": _COUNT, "score": {"type": "number"}}, ["index", "score"])
    return {"anyOf": [answer, {"type": "array", "items": rank}]}


def score_input() -> Schema:
    side = {"anyOf": [_TEXT, _many(_TEXT)]}
    fields = {
        "model": _MODEL,
        "text_1": side,
        "text_2": side,
        "use_activation": field("boolean", "False: logits instead of scores between 0 and 1.", default=True),
        **shorten_fields(),
    }
    return object_(fields, ["text_1", "text_2"])


def score_output() -> Schema:
    item = object_({"index": _COUNT, "object": {"const": "score"}, "score": {"type": "number"}}, ["index", "score"])
    fields = {"id": _TEXT, "object": {"const": "list"}, "model": _TEXT, "data": {"type": "array", "items": item}}
    return object_(fields, ["id", "object", "model", "data"])
