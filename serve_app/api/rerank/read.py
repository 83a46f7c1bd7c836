"""Reading rerankers' dialects: Cohere's and Jina's ``documents``, TEI's ``texts``, and vLLM's ``score``."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.ranges import DOCUMENT_TOKENS, RANKED
from serve_app.api.fields.shorten import parse_shorten
from serve_app.api.fields.values import boolean, refuse, string, text, texts
from serve_app.api.types import RerankRequest, Shorten
from serve_app.api.workers_ai.read import MAX_CONTEXTS

# The names under which vLLM takes the two sides of a score, as old versions and new ones have them.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def parse_rerank(body: dict[str, Any], model: str) -> RerankRequest:
    """``{query, documents}`` as Cohere, Jina and vLLM have it, or ``{query, texts}`` as TEI has it.

    Long documents are cut, as with Cohere and Jina; TEI's ``texts`` only where ``truncate`` says so.
    """
    query = string(body, "query")
    if not query:
        raise InvalidInput("query is missing; send a string that is not empty.", param="query")
    if is_tei(body):
        found = _texts(body, "texts")
        return RerankRequest(
            model,
            query,
            found,
            shorten=parse_shorten(body),
            raw=bool(boolean(body, "raw_scores")),
            **parse_asked(body),
        )
    _refuse_unsupported(body)
    shorten = Shorten(second=DOCUMENT_TOKENS.read(body, "max_tokens_per_doc"))
    top = RANKED.read(body, "top_n")
    return RerankRequest(
        model,
        query,
        _documents(body),
        top or None,
        shorten=parse_shorten(body, shorten),
        raw=_raw(body),
        **parse_asked(body),
    )


def is_tei(body: dict[str, Any]) -> bool:
    """Whether a body is of TEI's kind, whose answer is another."""
    return body.get("texts") is not None and body.get("documents") is None


def wants_documents(body: dict[str, Any], *, default: bool) -> bool:
    """Whether the answer repeats the documents."""
    wanted = boolean(body, "return_text" if is_tei(body) else "return_documents")
    return default if wanted is None else wanted


def parse_score(body: dict[str, Any], model: str) -> RerankRequest:
    """Pairs of texts: one against one or many, or each against the one in its place."""
    names = next((pair for pair in SIDES if all(body.get(name) is not None for name in pair)), None)
    if names is None:
        forms = "; ".join(f"{first} and {second}" for first, second in SIDES)
        raise InvalidInput(f"Two sides are missing; send {forms}.", param="text_1")
    first, second = (_texts(body, name) for name in names)
    if len(first) not in (1, len(second)):
        raise InvalidInput(
            f"{names[0]} must hold one text, or as many as {names[1]}: got {len(first)} and {len(second)}.",
            param=names[0],
        )
    queries = first * len(second) if len(first) == 1 else first
    return RerankRequest(
        model, first[0], second, queries=queries, shorten=parse_shorten(body), raw=_raw(body), **parse_asked(body)
    )


def _texts(body: dict[str, Any], name: str) -> list[str]:
    if body.get(name) is None:
        raise InvalidInput(f"{name} is missing; send an array of strings.", param=name)
    return texts(body[name], name, limit=MAX_CONTEXTS)


def _documents(body: dict[str, Any]) -> list[str]:
    """Strings, or objects of which ``rank_fields`` (``text`` unless given) are read."""
    value = body.get("documents")
    if value is None:
        raise InvalidInput("documents is missing; send an array of strings or of {text}.", param="documents")
    if not isinstance(value, list):
        raise refuse("documents", "an array of strings or of {text}", value)
    if not value:
        raise InvalidInput("documents must hold at least one item.", param="documents")
    if len(value) > MAX_CONTEXTS:
        message = f"documents must have at most {MAX_CONTEXTS} items, got {len(value)}; send several requests."
        raise InvalidInput(message, param="documents")
    named = body.get("rank_fields")
    fields = ["text"] if named in (None, []) else texts(named, "rank_fields", limit=64)
    return [_document(item, f"documents[{i}]", fields) for i, item in enumerate(value)]


def _document(item: Any, where: str, fields: list[str]) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise refuse(where, "a string or an object with text", item)
    if len(fields) == 1:
        return text(item.get(fields[0]), f"{where}.{fields[0]}"[:120])
    # As Cohere joins them: one line a field, its name first.
    return "\n".join(f"{name}: {text(item.get(name), f'{where}.{name}'[:120])}" for name in fields)


def _raw(body: dict[str, Any]) -> bool:
    """vLLM's switch of the last step, under the names it has had."""
    flags = [boolean(body, name) for name in ("use_activation", "activation")]
    return any(flag is False for flag in flags)


def _refuse_unsupported(body: dict[str, Any]) -> None:
    chunks = body.get("max_chunks_per_doc")
    if chunks not in (None, 1):
        raise InvalidInput(
            "max_chunks_per_doc: documents are read in one piece here; leave it out, or split them.",
            param="max_chunks_per_doc",
        )
    spans = body.get("relevant_spans")
    if spans is not None and not (isinstance(spans, dict) and spans.get("mode") == "disabled"):
        raise InvalidInput("relevant_spans is not supported; leave the field out.", param="relevant_spans")
