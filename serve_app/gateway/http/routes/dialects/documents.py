"""Documents to Markdown: Cloudflare's `tomarkdown`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput, OutOfCapacity
from serve_app.api.fields.body import parse_inner
from serve_app.api.multipart import BodyPart
from serve_app.api.schema import dialects as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.schema.parts import Schema, field, object_
from serve_app.documents.convert import Converter, supported
from serve_app.documents.formats import MAX_CHARS, format_of
from serve_app.gateway.http.exchange import ACCOUNT, USE, Endpoint, Exchange, json_answer
from serve_app.media.preparing import Full

MAX_FILES = 20
# A usual text has so many characters a token; no model is asked.
CHARS_PER_TOKEN = 4
_TAG = "Documents"


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = DocumentRoutes(exchange)
    path = ACCOUNT + "/ai/tomarkdown"
    file: Schema = {"type": "string", "format": "binary"}
    form = object_(
        {
            "files": {"type": "array", "items": file, "minItems": 1, "maxItems": MAX_FILES},
            "conversionOptions": field("string", "JSON; taken and not used."),
        },
        ["files"],
    )
    one = object_(
        {
            "id": {"type": "string"},
            "name": {"type": "string"},
            "mimeType": {"type": "string"},
            "format": {"type": "string", "enum": ["markdown", "error"]},
            "tokens": field("integer", "About so many."),
            "data": field("string", "Markdown."),
            "error": field("string", "Why there is none."),
        },
        ["id", "name", "mimeType", "format"],
    )
    known = object_({"extension": {"type": "string"}, "mimeType": {"type": "string"}}, ["extension", "mimeType"])
    told = schemas.enveloped({"type": "array", "items": one})
    listed = schemas.enveloped({"type": "array", "items": known})
    converting = Operation(
        "Documents as Markdown", _TAG, told, form, {"files": ["(a PDF)"]}, body_type="multipart/form-data"
    )
    return [
        Endpoint("POST", path, routes.convert, converting),
        Endpoint(
            "GET", path + "/supported", routes.supported, Operation("Documents that can be converted", _TAG, listed),
            scopes=USE,
        ),
    ]  # fmt: skip


class DocumentRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._converter = Converter()

    async def supported(self, request: Request) -> Response:
        return json_answer(success([{"extension": name, "mimeType": kind} for name, kind in supported()]))

    async def convert(self, request: Request) -> Response:
        parts = await self._exchange.parts(request)
        for part in parts:
            if part.name == "conversionOptions" and not isinstance(_json(part), dict):
                raise InvalidInput("conversionOptions must be a JSON object.", param="conversionOptions")
        files = [part for part in parts if part.name.removesuffix("[]") == "files"]
        if not files:
            raise InvalidInput("files is missing; send the documents as parts of the form.", param="files")
        if len(files) > MAX_FILES:
            raise InvalidInput(f"files: at most {MAX_FILES} at once, got {len(files)}.", param="files")
        account = request.state.account
        tasks = [asyncio.ensure_future(self._one(account, number, part)) for number, part in enumerate(files)]
        try:
            found, left = await asyncio.gather(*tasks), MAX_CHARS
        finally:
            # Who leaves, or is refused for one of them, has none of the others converted.
            for task in tasks:
                task.cancel()
        for told in found:
            left -= len(told.get("data", ""))
            if left < 0 and told.pop("data", None) is not None:
                del told["tokens"]
                told |= {"format": "error", "error": f"All documents together have more than {MAX_CHARS} characters."}
        return json_answer(success(found))

    async def _one(self, account: str, number: int, part: BodyPart) -> dict[str, Any]:
        known = format_of(part.filename, part.media_type)
        told = {
            "id": str(number),
            # Whatever bytes it was sent in.
            "name": part.filename.encode(errors="replace").decode(),
            "mimeType": part.media_type if known is None else known.media_type,
        }
        try:
            found = await self._converter.convert(account, part.filename, part.media_type, part.data)
        except Full:
            raise OutOfCapacity("Too many documents wait to be converted, please try again.", retry_after=5.0) from None
        if found.error:
            return {**told, "format": "error", "error": f"{found.error[0].upper()}{found.error[1:]}."}
        tokens = -(-len(found.text) // CHARS_PER_TOKEN)
        return {**told, "format": "markdown", "tokens": tokens, "data": found.text}


def _json(part: BodyPart) -> Any:
    try:
        return parse_inner(part.text)
    except ValueError:
        return None
