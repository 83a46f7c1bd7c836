"""Routes of usage: our own, Cloudflare's GraphQL, and OpenAI's of an organisation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import InvalidInput
from serve_app.api.schema import usage as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import EmbedRequest, GenerateRequest, TaskRequest
from serve_app.gateway.http.auth import is_operator
from serve_app.gateway.http.exchange import ACCOUNT, READ, Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.gateway.usage import openai
from serve_app.gateway.usage.graphql.lists import Looks
from serve_app.gateway.usage.graphql.run import answer
from serve_app.gateway.usage.outliers import Outlier, check_all, most_unusual, outliers, parse_outliers
from serve_app.gateway.usage.read import parse_usage
from serve_app.gateway.usage.write import render_csv, render_entry, render_outliers, render_usage
from serve_app.state.spending.usage import UsagePage, UsageRow
from serve_app.tasks.registry import taking

_TAG = "Usage"
_QUERY = "{viewer{accounts{aiInferenceAdaptiveGroups(limit: 10){count sum{totalNeurons} dimensions{modelId}}}}}"
USAGE = Operation("What was used, in units, neurons and money", _TAG, schemas.usage(), query=schemas.usage_query())
OUTLIERS = Operation(
    "Days on which more was used than is usual", _TAG, schemas.outliers(), query=schemas.outliers_query()
)
RECEIPT = Operation("What one request used and cost", _TAG, schemas.receipt())
GRAPHQL = Operation(
    "Cloudflare's GraphQL analytics", _TAG, schemas.graphql_answer(), schemas.graphql_input(), {"query": _QUERY}
)
COMPLETIONS = Operation("What text generation used", _TAG, schemas.buckets(), query=schemas.buckets_query())
EMBEDDINGS = Operation("What embeddings used", _TAG, schemas.buckets(), query=schemas.buckets_query())
COSTS = Operation("What it cost", _TAG, schemas.buckets(), query=schemas.buckets_query())


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes, own = UsageRoutes(exchange), ACCOUNT + "/ai/usage"
    found = [
        Endpoint("GET", own, routes.usage, USAGE, scopes=READ, operated=True),
        Endpoint("GET", own + "/outliers", routes.outliers, OUTLIERS, scopes=READ, operated=True),
        Endpoint("GET", own + "/{id}", routes.receipt, RECEIPT, scopes=READ, operated=True),
        Endpoint("POST", "/client/v4/graphql", routes.graphql, GRAPHQL, scopes=READ),
    ]
    for prefix in OPENAI:
        organisation = prefix + "/organization"
        found += [
            Endpoint("GET", organisation + "/usage/completions", routes.completions, COMPLETIONS, openai_body, READ),
            Endpoint("GET", organisation + "/usage/embeddings", routes.embeddings, EMBEDDINGS, openai_body, READ),
            Endpoint("GET", organisation + "/costs", routes.costs, COSTS, openai_body, READ),
        ]
    return found


class UsageRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def usage(self, request: Request) -> Response:
        account, everybody = request.path_params["account"], self._sees_all(request)
        asked = parse_usage(request.query_params, account, time.time(), everybody=everybody)
        page = await self._exchange.gateway.state.usage.sums(asked.query)
        if asked.csv:
            return Response(render_csv(asked, page), media_type="text/csv", headers={"X-Total-Count": str(page.total)})
        return json_answer(render_usage(asked, page))

    async def outliers(self, request: Request) -> Response:
        account, everybody = request.path_params["account"], self._sees_all(request)
        asked = parse_outliers(request.query_params, account, time.time(), everybody=everybody)
        found: list[Outlier] = []
        for group in asked.groups:
            page = await self._exchange.gateway.state.usage.sums(asked.query(group))
            check_all(page.total, len(page.rows))
            found += await asyncio.to_thread(outliers, page.rows, group, asked.first, asked.today)
        return json_answer(render_outliers(asked, most_unusual(found)))

    async def receipt(self, request: Request) -> Response:
        usage, asked = self._exchange.gateway.state.usage, request.path_params
        return json_answer(render_entry(await usage.receipt(asked["account"], asked["id"])))

    async def graphql(self, request: Request) -> Response:
        body = await self._exchange.body(request, TaskRequest)
        store, everybody = self._exchange.gateway.state.usage, self._sees_all(request)
        looks = Looks(request.state.account, lambda account: everybody, store.sums, store.entries, time.time())
        return json_answer(await answer(body, looks))

    async def completions(self, request: Request) -> Response:
        kind: dict[str, Any] = {"groups": openai.COMPLETIONS, "only": {"task": _tasks(GenerateRequest)}}
        units = ("input_tokens", "cached_tokens", "output_tokens")
        return await self._buckets(request, openai.render_completions, units=units, **kind)

    async def embeddings(self, request: Request) -> Response:
        kind: dict[str, Any] = {"groups": openai.EMBEDDINGS, "only": {"task": _tasks(EmbedRequest)}}
        return await self._buckets(request, openai.render_embeddings, units=("input_tokens",), **kind)

    async def costs(self, request: Request) -> Response:
        kind: dict[str, Any] = {"groups": openai.COSTS, "widths": openai.COST_WIDTHS, "by": ("currency",)}
        return await self._buckets(request, openai.render_costs, **kind)

    async def _buckets(
        self,
        request: Request,
        render: Callable[[openai.AskedBuckets, Iterable[UsageRow]], dict[str, Any]],
        **kind: Any,
    ) -> Response:
        everybody = self._sees_all(request)
        asked = openai.parse_buckets(
            request.query_params, request.state.account, time.time(), everybody=everybody, **kind
        )
        page: UsagePage = await self._exchange.gateway.state.usage.sums(asked.query)
        if page.total > len(page.rows):
            raise InvalidInput(f"There are {page.total} results; group by less, or lower limit.", param="limit")
        return json_answer(render(asked, page.rows))

    def _sees_all(self, request: Request) -> bool:
        return is_operator(request.state.caller, self._exchange.gateway.settings.account)


def _tasks(kind: type[TaskRequest]) -> tuple[str, ...]:
    """Names of the tasks that run such requests."""
    return tuple(task.declaration.name for task in taking(kind))
