"""OpenAI's batches."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import InvalidInput
from serve_app.api.openai import batches as openai
from serve_app.api.schema import batches as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import TaskRequest
from serve_app.batch.apis import ENDPOINTS, openai_api
from serve_app.batch.front import refusal
from serve_app.batch.intake import Intake, Problem, Refusal
from serve_app.batch.progress import extras
from serve_app.batch.sheet import Sheet, batch_id
from serve_app.batch.split import lines
from serve_app.gateway.batch_estimate import asks_estimate, estimate_batch
from serve_app.gateway.http.exchange import USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.idempotent import check_key
from serve_app.gateway.http.routes.deferred.files import find_file
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.state.blobs.files import NoFile
from serve_app.state.blobs.uploads import Upload, results_id
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch

_TAG = "OpenAI Batches"
# What is looked at before a batch is taken.
FIRST_BYTES = 1 << 20
_EXAMPLE = {"input_file_id": "file-0123", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
CREATE = Operation("Create a batch", _TAG, schemas.openai_batch(), schemas.openai_create(), _EXAMPLE)
LIST = Operation("Batches", _TAG, schemas.listed(schemas.openai_batch()), query=schemas.page_query())
GET = Operation("A batch", _TAG, schemas.openai_batch())
CANCEL = Operation("Cancel a batch", _TAG, schemas.openai_batch())
_DOORS = ("openai",)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in OPENAI for endpoint in under(exchange, prefix)]


def under(exchange: Exchange, prefix: str) -> list[Endpoint]:
    """The dialect's routes below ``prefix``."""
    routes = BatchRoutes(exchange)
    one = prefix + "/batches/{batch_id}"
    return [
        Endpoint("POST", prefix + "/batches", routes.create, CREATE, openai_body),
        Endpoint("GET", prefix + "/batches", routes.list, LIST, openai_body, USE),
        Endpoint("GET", one, routes.get, GET, openai_body, USE),
        Endpoint("POST", one + "/cancel", routes.cancel, CANCEL, openai_body),
    ]


class BatchRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, request: Request) -> Response:
        batches, caller = self._exchange.gateway.batches, request.state.caller
        asked = openai.parse_create(await self._exchange.body(request, TaskRequest), ENDPOINTS)
        file = await find_file(self._exchange, request, asked["file"])
        if file.purpose != "batch":
            raise InvalidInput("input_file_id must name a file whose purpose is batch.", param="input_file_id")
        if asks_estimate(request):
            return json_answer(await self._estimate(file, asked["endpoint"], caller))
        intake, whole = await batches.aside(self._looked_at, file, asked["endpoint"], caller)
        named = batch_id(caller, "openai", check_key(request))
        about = {
            "id": f"batch_{named}",
            "endpoint": asked["endpoint"],
            "input_file_id": asked["file"],
            "completion_window": asked["window"],
            "metadata": asked["metadata"],
            "model": intake.first_model,
        }
        sheet = Sheet(named, "openai", caller, about, asked["kept_s"])
        with closing(intake):
            if not whole:
                return _shown(await batches.accept(sheet, file.blob))
            made = await batches.take_in(sheet, intake, file.blob)
        # Clients have read of every batch that it is being checked first.
        return _shown(replace(made, status="validating") if made.status == "queued" else made)

    async def _estimate(self, file: Upload, endpoint: str, caller: Caller) -> dict[str, Any]:
        """Of a file's first megabyte, where there is more: what it says of ``bytes`` holds for the rest as well."""
        batches = self._exchange.gateway.batches
        first = await batches.aside(batches.files().get, file.blob, 0, FIRST_BYTES)
        whole = file.size <= FIRST_BYTES
        piece = first if whole else first[: first.rfind(b"\n") + 1]
        rows = [row for _, row in lines([piece], batches.known.longest) if row is not None]
        told = await estimate_batch(self._exchange.gateway, openai_api(endpoint), caller, rows)
        return {**told, "estimated_bytes": len(piece), "bytes": file.size}

    def _looked_at(self, file: Upload, endpoint: str, caller: Caller) -> tuple[Intake, bool]:
        """What has taken the file's first megabyte, to be closed, and whether that is all. What is wrong there is
        refused at once: a batch would fail of it later.
        """
        batches = self._exchange.gateway.batches
        files, intake = batches.files(), Intake(openai_api(endpoint), batches.known, caller, most=batches.known.most)
        whole = file.size <= FIRST_BYTES
        with ExitStack() as failed:
            failed.callback(intake.close)
            try:
                first = files.get(file.blob, 0, FIRST_BYTES)
            except NoFile:
                message = "The bytes of input_file_id are gone; upload it again."
                raise InvalidInput(message, param="input_file_id") from None
            piece = first if whole else first[: first.rfind(b"\n") + 1]
            for number, row in lines([piece], batches.known.longest):
                intake.take(number, row)
            intake.check_ids()
            wrong = intake.problems
            if whole and not intake.good:
                wrong = wrong or intake.faults or [Problem("empty_file", "There are no requests in it.")]
            if wrong:
                raise refusal(Refusal.of(wrong))
            failed.pop_all()
        return intake, whole

    async def list(self, request: Request) -> Response:
        after, limit = openai.parse_batches_page(request.query_params)
        found, more = await self._exchange.gateway.batches.page(request.state.account, _DOORS, after=after, limit=limit)
        return json_answer(openai.render_list([shown(one) for one in found], more))

    async def get(self, request: Request) -> Response:
        named = request.path_params["batch_id"]
        found = await self._exchange.gateway.batches.find(request.state.account, openai.batch_key(named))
        return _shown(_there(found, named))

    async def cancel(self, request: Request) -> Response:
        named = request.path_params["batch_id"]
        batches, key = self._exchange.gateway.batches, openai.batch_key(named)
        _there(await batches.find(request.state.account, key), named)
        found = await batches.cancel(request.state.account, key)
        return _shown(_there(found, named))


def _there(found: Batch | None, named: str) -> Batch:
    if found is None or found.door != "openai":
        raise openai.no_batch(named)
    return found


def shown(batch: Batch) -> dict[str, Any]:
    about = orjson.loads(batch.about)
    for kind, field in (("output", "output_file_id"), ("errors", "error_file_id")):
        about[field] = f"file-{results_id(batch.id, kind)}" if getattr(batch, kind) else None
    counts, used = batch.counts, batch.used
    ended = {f"{batch.status}_at": batch.ended} if batch.ended is not None else {}
    return openai.render_batch(
        batch.id,
        status=batch.status,
        about=about,
        problems=orjson.loads(batch.problems),
        counts=(counts.total, counts.succeeded, counts.failed + counts.expired + counts.cancelled),
        usage=(used.input_tokens, used.cached_tokens, used.output_tokens),
        created=batch.created,
        times={
            "in_progress_at": batch.started,
            "expires_at": batch.deadline,
            "finalizing_at": batch.finalizing,
            "cancelling_at": batch.cancelling,
            **ended,
        },
        more=extras(batch, time.time()),
    )


def _shown(batch: Batch) -> Response:
    return json_answer(shown(batch))
