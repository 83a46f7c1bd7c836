"""Anthropic's message batches."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serve_app.api.anthropic import batches as anthropic
from serve_app.api.anthropic.write import error_body
from serve_app.api.errors import InvalidInput, KeyReused
from serve_app.api.schema import batches as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.batch.apis import Malformed, anthropic_api, anthropic_id
from serve_app.batch.sheet import Sheet, batch_id
from serve_app.batch.split import ArrayItems
from serve_app.gateway.batch_estimate import asks_estimate, estimate_batch
from serve_app.gateway.http.blobs import blob_answer
from serve_app.gateway.http.bodies import GZIP, unzipped
from serve_app.gateway.http.exchange import RUN, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.idempotent import check_key
from serve_app.gateway.http.pour import Begun, begin, pour
from serve_app.gateway.http.routes.prefixes import ANTHROPIC
from serve_app.state.deferred.batches import ENDED, Batch

_TAG = "Anthropic Batches"
INLINE_BYTES = 10_000_000
MAX_BYTES = 256 << 20
MAX_REQUESTS = 100_000
JSONL = "application/x-jsonl"
_TURN = {"role": "user", "content": "What does math.sqrt do?"}
_PARAMS = {"model": "@cf/pico/pico-instruct", "max_tokens": 64, "messages": [_TURN]}
_EXAMPLE = {"requests": [{"custom_id": "one", "params": _PARAMS}]}
CREATE = Operation("Create a batch of messages", _TAG, schemas.anthropic_batch(), schemas.anthropic_create(), _EXAMPLE)
LIST = Operation("Batches", _TAG, schemas.listed(schemas.anthropic_batch()), query=schemas.anthropic_page_query())
GET = Operation("A batch", _TAG, schemas.anthropic_batch())
CANCEL = Operation("Cancel a batch", _TAG, schemas.anthropic_batch())
DELETE = Operation("Delete a batch that has ended", _TAG)
RESULTS = Operation("Its results, one JSON object a line", _TAG, {"type": "string"}, media_type=JSONL)
_DOORS = ("anthropic",)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in ANTHROPIC for endpoint in under(exchange, prefix)]


def under(exchange: Exchange, prefix: str) -> list[Endpoint]:
    """The dialect's routes below ``prefix``."""
    routes = BatchRoutes(exchange)
    all_of, one = prefix + "/messages/batches", prefix + "/messages/batches/{batch_id}"
    return [
        Endpoint("POST", all_of, routes.create, CREATE, error_body, RUN, keyed=False),
        Endpoint("GET", all_of, routes.list, LIST, error_body, USE),
        Endpoint("GET", one, routes.get, GET, error_body, USE),
        Endpoint("DELETE", one, routes.delete, DELETE, error_body),
        Endpoint("POST", one + "/cancel", routes.cancel, CANCEL, error_body),
        Endpoint("GET", one + "/results", routes.results, RESULTS, error_body, USE),
    ]


class BatchRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, request: Request) -> Response:
        """One `Idempotency-Key` makes one batch, whose id is drawn from it."""
        batches, caller = self._exchange.gateway.batches, request.state.caller
        key = check_key(request)
        named = batch_id(caller, "anthropic", key)
        begun = await begin(request, INLINE_BYTES)
        if begun.whole:
            data = await self._plain(request, begun.data)
            printed = hashlib.sha256(data).hexdigest()
            if (there := await self._again(request, named, printed, key)) is not None:
                return there
            items = await batches.aside(_items, data, batches.known.longest)
            if asks_estimate(request):
                return json_answer(await estimate_batch(self._exchange.gateway, anthropic_api(), caller, items))
            sheet = Sheet(named, "anthropic", caller, _about(named, printed))
            made = await batches.submit(sheet, anthropic_api(), items, self._most)
        else:
            made = await self._poured(request, named, begun, key)
        return self._shown(request, made)

    @property
    def _most(self) -> int:
        return max(MAX_REQUESTS, self._exchange.gateway.batches.known.most)

    async def _plain(self, request: Request, data: bytes) -> bytes:
        if request.headers.get("content-encoding", "").strip().lower() not in GZIP:
            return data
        return await self._exchange.gateway.batches.aside(unzipped, data, INLINE_BYTES)

    async def _poured(self, request: Request, named: str, begun: Begun, key: str | None) -> Batch:
        """A large batch goes to where blobs are, and is checked by whoever runs it; ids are looked at on the way."""
        batches, caller = self._exchange.gateway.batches, request.state.caller
        there = None if key is None else await batches.find(caller.account, named)
        files, digest = batches.files(), hashlib.sha256()
        # Of two that come at the same time under one key the second must not touch the bytes of the first.
        blob = f"batches/{named}/input-{uuid.uuid4().hex}.json"
        seen = _Seen(batches.known.longest, self._most)

        def kept(pieces: Iterator[bytes]) -> None:
            def passing() -> Iterator[bytes]:
                for piece in pieces:
                    digest.update(piece)
                    seen.look(piece)
                    yield piece
                seen.finish()

            if there is None:
                files.put(blob, passing())
            else:
                for _ in passing():
                    pass

        await pour(request, kept, MAX_BYTES, batches.pool, begun)
        printed = digest.hexdigest()
        if there is not None:
            return _same(there, printed)
        sheet = Sheet(named, "anthropic", caller, _about(named, printed))
        made = await batches.accept(sheet, blob, seen.count)
        if made.input != blob:
            await batches.aside(files.delete, blob)
        return _same(made, printed)

    async def _again(self, request: Request, named: str, printed: str, key: str | None) -> Response | None:
        if key is None:
            return None
        there = await self._exchange.gateway.batches.find(request.state.account, named)
        if there is None:
            return None
        answer = self._shown(request, _same(there, printed))
        answer.headers["Idempotent-Replayed"] = "true"
        return answer

    async def list(self, request: Request) -> Response:
        after, before, limit = anthropic.parse_page(request.query_params)
        batches = self._exchange.gateway.batches
        found, more = await batches.page(request.state.account, _DOORS, after=after, before=before, limit=limit)
        return json_answer(anthropic.render_list([shown(request, one) for one in found], more))

    async def get(self, request: Request) -> Response:
        return self._shown(request, await self._found(request))

    async def cancel(self, request: Request) -> Response:
        batches, found = self._exchange.gateway.batches, await self._found(request)
        cancelled = await batches.cancel(request.state.account, found.id) or found
        return self._shown(request, cancelled)

    async def delete(self, request: Request) -> Response:
        found = await self._found(request)
        if not await self._exchange.gateway.batches.delete(found):
            raise InvalidInput("This batch has not ended; cancel it first.", param="message_batch_id")
        return json_answer(anthropic.render_deleted(found.id))

    async def results(self, request: Request) -> Response:
        batches, found = self._exchange.gateway.batches, await self._found(request)
        if found.status in ENDED:
            if not found.output:
                return Response(b"", media_type=JSONL)
            return await blob_answer(request, batches.files(), found.output, JSONL, batches.aside)
        pieces: AsyncIterator[bytes] = batches.results(found)
        return StreamingResponse(pieces, media_type=JSONL)

    async def _found(self, request: Request) -> Batch:
        named = request.path_params["batch_id"]
        found = await self._exchange.gateway.batches.find(request.state.account, anthropic.batch_key(named))
        if found is None or found.door != "anthropic":
            raise anthropic.no_batch(named)
        return found

    def _shown(self, request: Request, batch: Batch) -> Response:
        return json_answer(shown(request, batch))


class _Seen:
    """Looks at a large body on its way: whether it is an array of requests whose ids differ."""

    def __init__(self, longest: int, most: int) -> None:
        self._items = ArrayItems("requests", longest)
        self._ids: set[str] = set()
        self._most = most

    @property
    def count(self) -> int:
        return len(self._ids)

    def look(self, piece: bytes) -> None:
        for item in self._items.feed(piece):
            where = f"requests[{len(self._ids)}]"
            try:
                found = anthropic_id(item)
            except Malformed as error:
                raise InvalidInput(f"{where}: {error}", param=where) from None
            if found in self._ids:
                raise InvalidInput(f"{where}: custom_id {found} is there twice.", param=f"{where}.custom_id")
            self._ids.add(found)
            if len(self._ids) > self._most:
                raise InvalidInput(f"A batch has at most {self._most} requests.", param="requests")

    def finish(self) -> None:
        self._items.finish()
        if not self._ids:
            raise InvalidInput("requests must hold at least one item.", param="requests")


def _items(data: bytes, longest: int) -> list[bytes]:
    items = ArrayItems("requests", longest)
    found = list(items.feed(data))
    items.finish()
    return found


def _about(named: str, printed: str) -> dict[str, Any]:
    return {"id": f"msgbatch_{named}", "print": printed}


def _same(there: Batch, printed: str) -> Batch:
    """Raises `KeyReused` for another one's key."""
    if orjson.loads(there.about).get("print") != printed:
        raise KeyReused
    return there


def shown(request: Request, batch: Batch) -> dict[str, Any]:
    counts = batch.counts
    prefix = request.url.path.partition("/messages/batches")[0]
    return anthropic.render_batch(
        batch.id,
        status=batch.status,
        counts={
            "processing": counts.left,
            "succeeded": counts.succeeded,
            "errored": counts.failed,
            "canceled": counts.cancelled,
            "expired": counts.expired,
        },
        created=batch.created,
        expires=batch.deadline,
        ended=batch.ended,
        cancelling=batch.cancelling,
        results_url=str(request.url.replace(path=f"{prefix}/messages/batches/msgbatch_{batch.id}/results", query="")),
    )
