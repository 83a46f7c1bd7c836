"""Batches of every API: what there is, how far each is, its results, its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serve_app.api import sse
from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput
from serve_app.api.schema import batches as schemas
from serve_app.api.schema.dialects import enveloped
from serve_app.api.schema.openapi import Operation
from serve_app.api.workers_ai import batches as workers_ai
from serve_app.batch.progress import shown
from serve_app.gateway.http.blobs import blob_answer
from serve_app.gateway.http.exchange import ACCOUNT, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.streams import EventStream
from serve_app.state.deferred.batches import ENDED, Batch

_TAG = "Batches"
JSONL = "application/jsonl"
# How often somebody who follows a batch is told, and for how long nothing may be told.
TOLD_S, SILENT_S = 0.5, 10.0
BATCH = enveloped(schemas.native_batch())
LIST = Operation("Batches of every API", _TAG, query=schemas.page_query())
GET = Operation("A batch", _TAG, BATCH)
CANCEL = Operation("Cancel a batch", _TAG, BATCH)
DELETE = Operation("Cancel a batch, or delete one that has ended", _TAG, BATCH)
RETRY = Operation("Run what did not succeed again, as a new batch", _TAG, BATCH)
RESULTS = Operation(
    "Its results, one JSON object a line, as its API has them; a range of them where it has ended",
    _TAG,
    {"type": "string"},
    query={"errors": {"type": "string", "enum": ["true", "false"]}},
    media_type=JSONL,
)
EVENTS = Operation("How far it is, as it goes on", _TAG, {"type": "string"}, media_type="text/event-stream")


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = BatchRoutes(exchange)
    one = ACCOUNT + "/ai/batches/{batch_id}"
    return [
        Endpoint("GET", ACCOUNT + "/ai/batches", routes.list, LIST, scopes=USE),
        Endpoint("GET", one, routes.get, GET, scopes=USE),
        Endpoint("POST", one + "/cancel", routes.cancel, CANCEL),
        Endpoint("DELETE", one, routes.delete, DELETE),
        Endpoint("POST", one + "/retry", routes.retry, RETRY),
        Endpoint("GET", one + "/results", routes.results, RESULTS, scopes=USE),
        Endpoint("GET", one + "/events", routes.events, EVENTS, scopes=USE),
    ]


class BatchRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def list(self, request: Request) -> Response:
        after, limit = workers_ai.parse_page(request.query_params)
        found, more = await self._exchange.gateway.batches.page(request.state.account, (), after=after, limit=limit)
        now = time.time()
        told = {"count": len(found), "has_more": more, "last_id": found[-1].id if found else None}
        return json_answer(success([shown(one, now) for one in found], result_info=told))

    async def get(self, request: Request) -> Response:
        return shown_answer(await self._found(request))

    async def cancel(self, request: Request) -> Response:
        return shown_answer(await self._cancelled(await self._found(request)))

    async def delete(self, request: Request) -> Response:
        found = await self._found(request)
        if found.status not in ENDED:
            return shown_answer(await self._cancelled(found))
        if not await self._exchange.gateway.batches.delete(found):
            raise InvalidInput("The batch is just being put away; try again in a moment.")
        return shown_answer(found)

    async def retry(self, request: Request) -> Response:
        found, batches = await self._found(request), self._exchange.gateway.batches
        if found.status not in ENDED:
            raise InvalidInput("This batch has not ended; wait for it, or cancel it first.", param="batch_id")
        return shown_answer(await batches.retry(found, request.state.caller))

    async def results(self, request: Request) -> Response:
        found, batches = await self._found(request), self._exchange.gateway.batches
        errors = request.query_params.get("errors", "").lower() in ("true", "1")
        if found.status not in ENDED:
            return StreamingResponse(batches.results(found, errors), media_type=JSONL)
        name = found.errors if errors else found.output
        if not name:
            return Response(b"", media_type=JSONL)
        return await blob_answer(request, batches.files(), name, JSONL, batches.aside)

    async def events(self, request: Request) -> Response:
        frames = self._frames(await self._found(request))
        return EventStream(frames, frames)

    async def _frames(self, batch: Batch) -> AsyncGenerator[bytes]:
        batches, told, at = self._exchange.gateway.batches, b"", 0.0
        while True:
            now = time.monotonic()
            state = orjson.dumps(shown(batch, time.time()))
            counted = orjson.dumps((batch.status, batch.counts.left))
            if counted != told or now - at > SILENT_S:
                told, at = counted, now
                yield (
                    b"event: "
                    + (b"batch" if batch.status not in ENDED else batch.status.encode())
                    + b"\ndata: "
                    + state
                    + b"\n\n"
                )
            if batch.status in ENDED:
                yield sse.DONE
                return
            await asyncio.sleep(TOLD_S)
            found = await batches.find(batch.caller.account, batch.id)
            if found is None:
                yield sse.DONE
                return
            batch = found

    async def _cancelled(self, found: Batch) -> Batch:
        cancelled = await self._exchange.gateway.batches.cancel(found.caller.account, found.id)
        return cancelled or found

    async def _found(self, request: Request) -> Batch:
        named = request.path_params["batch_id"]
        key = named.removeprefix("batch_").removeprefix("msgbatch_")
        found = await self._exchange.gateway.batches.find(request.state.account, workers_ai.batch_key(key))
        if found is None:
            raise workers_ai.no_batch(named)
        return found


def shown_answer(found: Batch) -> Response:
    return json_answer(success(shown(found, time.time())))
