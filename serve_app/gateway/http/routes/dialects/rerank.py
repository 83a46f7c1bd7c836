"""Routes of rerankers, where clients of Cohere, Jina, TEI and vLLM look for them."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.fields.asked import with_headers
from serve_app.api.rerank import read, write
from serve_app.api.schema import ranking as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import RerankRequest
from serve_app.gateway.http.exchange import ACCOUNT, Endpoint, Exchange, Handler, json_answer

_TAG = "Reranking"
_MODEL = "@cf/pico/pico-reranker"
_DOCUMENTS = ["Close a file.", "Return the square root of x."]
_QUERY = "How is a square root computed?"
RERANK = Operation(
    "Rank documents for a query",
    _TAG,
    schemas.rerank_output(),
    schemas.rerank_input(),
    {"model": _MODEL, "query": _QUERY, "documents": _DOCUMENTS},
)
SCORE = Operation(
    "Score pairs of texts",
    _TAG,
    schemas.score_output(),
    schemas.score_input(),
    {"model": _MODEL, "text_1": _QUERY, "text_2": _DOCUMENTS},
)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = RerankRoutes(exchange)
    # Version 2 of Cohere's API repeats no documents; Jina and vLLM do, and share the path of version 1.
    first = partial(routes.rerank, version="1", documents=True)
    second = partial(routes.rerank, version="2", documents=False)
    listed: list[tuple[str, Handler, Operation]] = [("/rerank", first, RERANK), ("/score", routes.score, SCORE)]
    for prefix in ("", ACCOUNT + "/ai"):
        listed += [
            (prefix + "/v1/rerank", first, RERANK),
            (prefix + "/v2/rerank", second, RERANK),
            (prefix + "/v1/score", routes.score, SCORE),
        ]
    return [Endpoint("POST", path, handler, about, write.error_body) for path, handler, about in listed]


class RerankRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def rerank(self, request: Request, *, version: str, documents: bool) -> Response:
        body = await self._exchange.body(request, RerankRequest)
        model = await self._exchange.only_model(request, body, RerankRequest)
        parsed = with_headers(read.parse_rerank(body, model.id), request.headers)
        tei = read.is_tei(body)
        repeats = read.wants_documents(body, default=documents and not tei)
        scores, usage = await self._exchange.gateway.perform(model, parsed, request.state.caller)
        if tei:
            return json_answer(write.render_ranks(parsed, scores, texts=repeats))
        return json_answer(write.render_results(parsed, scores, usage, documents=repeats, version=version))

    async def score(self, request: Request) -> Response:
        body = await self._exchange.body(request, RerankRequest)
        model = await self._exchange.only_model(request, body, RerankRequest)
        parsed = with_headers(read.parse_score(body, model.id), request.headers)
        scores, usage = await self._exchange.gateway.perform(model, parsed, request.state.caller)
        return json_answer(write.render_scores(parsed, scores, usage))
