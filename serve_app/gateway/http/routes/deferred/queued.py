"""Workers AI's asynchronous batches, on the routes that run models: submitted with `queueRequest`, polled by id."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serve_app.api.envelopes import success
from serve_app.api.errors import BodyTooLarge
from serve_app.api.fields.lora import with_lora
from serve_app.api.receipt import MICRO
from serve_app.api.workers_ai import batches as workers_ai
from serve_app.batch.apis import native_api
from serve_app.batch.intake import STEP, too_many
from serve_app.batch.progress import cost
from serve_app.batch.sheet import Sheet, batch_id
from serve_app.gateway.batch_estimate import asks_estimate, estimate_batch
from serve_app.gateway.http.exchange import Exchange, json_answer
from serve_app.gateway.http.idempotent import check_key
from serve_app.state.deferred.batches import ENDED, Batch

# Of a whole body; larger inputs are for the other APIs.
MAX_BYTES = 10_000_000


async def queued(exchange: Exchange, request: Request, name: str, body: dict[str, Any]) -> Response | None:
    """The answer to a body that is about a batch; None for any other."""
    flag = request.query_params.get("queueRequest", "").lower() in ("true", "1")
    if not workers_ai.queued(body, flag):
        return None
    if (asked := workers_ai.polled(body)) is not None:
        return await poll(exchange, request, asked)
    if len(request.state.raw_body) > MAX_BYTES:
        raise BodyTooLarge(MAX_BYTES)
    items = workers_ai.parse_requests(body)
    model = await exchange.model(request, name, ready=False)
    gateway, caller = exchange.gateway, request.state.caller
    if len(items) > gateway.batches.known.most:
        raise too_many(gateway.batches.known.most)
    packed = await gateway.batches.aside(_packed, items, name)
    api = native_api(caller.account, model.id)
    if workers_ai.estimate_asked(body) or asks_estimate(request):
        return json_answer(success(await estimate_batch(gateway, api, caller, packed)))
    named = batch_id(caller, "workers-ai", check_key(request))
    sheet = Sheet(named, "workers-ai", caller, {"id": named, "model": model.id})
    made = await gateway.batches.submit(sheet, api, packed)
    return json_answer(success(workers_ai.render_queued(made.id, model.id)))


def _packed(items: list[Any], name: str) -> list[bytes]:
    """Each request as JSON, with the adapter that the address names. Tens of thousands take a while, and let others in
    between.
    """
    found = []
    for number, item in enumerate(items):
        if number % STEP == 0:
            time.sleep(0)
        found.append(orjson.dumps(with_lora(item, name) if isinstance(item, dict) else item))
    return found


async def poll(exchange: Exchange, request: Request, asked: str) -> Response:
    """How far a batch is, or its answers. Raises `NotFound`."""
    batches = exchange.gateway.batches
    found = await batches.find(request.state.account, asked)
    if found is None:
        raise workers_ai.no_batch(asked)
    model = orjson.loads(found.about).get("model") or ""
    if found.status not in ENDED:
        status = "queued" if found.status in ("validating", "queued") else "running"
        return json_answer(success(workers_ai.render_queued(found.id, model, status)))
    if found.door not in ("workers-ai", "python"):
        return json_answer(success(workers_ai.render_queued(found.id, model, found.status)))
    return StreamingResponse(_answers(batches.results(found), found), media_type="application/json")


async def _answers(pieces: AsyncIterator[bytes], batch: Batch) -> AsyncIterator[bytes]:
    """The envelope around all lines of results, which are never in memory together."""
    yield b'{"result":{"responses":['
    before = b""
    async for piece in pieces:
        # A line ends with a line feed: between two lines stands a comma, behind the last one none.
        if ended := piece.rstrip(b"\n"):
            yield before + ended.replace(b"\n", b",")
            before = b""
        if piece.endswith(b"\n"):
            before = b","
    used = batch.used
    usage = workers_ai.usage(used.input_tokens, used.cached_tokens, used.output_tokens)
    told = {**usage, "neurons": used.neurons / MICRO, **({"cost": found} if (found := cost(batch)) else {})}
    yield b'],"usage":' + orjson.dumps(told) + b'},"success":true,"errors":[],"messages":[]}'
