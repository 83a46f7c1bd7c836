"""OpenAI's files: what batches read, and what they wrote."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import InvalidInput, KeyReused
from serve_app.api.multipart import stream_multipart
from serve_app.api.openai import batches as openai
from serve_app.api.schema import batches as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.blobs import blob_answer
from serve_app.gateway.http.exchange import RUN, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.idempotent import check_key
from serve_app.gateway.http.pour import pour
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.state.blobs.uploads import Upload

_TAG = "OpenAI Batches"
# What stands around the file in its form.
FORM_BYTES = 64 << 10
JSONL = "application/jsonl"
UPLOAD = Operation(
    "Upload a file of requests",
    _TAG,
    schemas.file(),
    schemas.upload(),
    {"file": "", "purpose": "batch"},
    body_type="multipart/form-data",
)
LIST = Operation("Files", _TAG, schemas.listed(schemas.file()), query=schemas.files_query())
GET = Operation("A file", _TAG, schemas.file())
DELETE = Operation("Delete a file", _TAG, schemas.deleted())
CONTENT = Operation("The bytes of a file, or a range of them", _TAG, {"type": "string"}, media_type=JSONL)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in OPENAI for endpoint in under(exchange, prefix)]


def under(exchange: Exchange, prefix: str) -> list[Endpoint]:
    """The dialect's routes below ``prefix``."""
    routes = FileRoutes(exchange)
    one = prefix + "/files/{file_id}"
    return [
        Endpoint("POST", prefix + "/files", routes.create, UPLOAD, openai_body, RUN, keyed=False),
        Endpoint("GET", prefix + "/files", routes.list, LIST, openai_body, USE),
        Endpoint("GET", one, routes.get, GET, openai_body, USE),
        Endpoint("DELETE", one, routes.delete, DELETE, openai_body),
        Endpoint("GET", one + "/content", routes.content, CONTENT, openai_body, USE),
    ]


class FileRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, request: Request) -> Response:
        """One request with an `Idempotency-Key` is one file: boundaries differ between tries, so what is in the form
        is compared and not the body.
        """
        batches, account = self._exchange.gateway.batches, request.state.account
        content_type = request.headers.get("content-type", "")
        if not content_type.lower().startswith("multipart/form-data"):
            raise InvalidInput("Send the file as multipart/form-data, with the fields file and purpose.", param="file")
        key = check_key(request)
        named = hashlib.sha256(f"{account}\0file\0{key}".encode()).hexdigest()[:32] if key else uuid.uuid4().hex
        there = await batches.file(account, named) if key else None
        # A second try must not touch the bytes of the first.
        blob = f"files/{uuid.uuid4().hex}"
        files = batches.files()

        def kept(pieces: Iterator[bytes]) -> Upload:
            try:
                return _read(pieces)
            except BaseException:
                files.delete(blob)
                raise

        def _read(pieces: Iterator[bytes]) -> Upload:
            digest, fields, size, name = hashlib.sha256(), {}, -1, ""
            for part in stream_multipart(pieces, content_type):
                if part.name == "file":
                    if size >= 0:
                        raise InvalidInput("Send one file at a time.", param="file")
                    name = openai.file_name(part.filename)
                    size = files.put(blob, _hashed(part.pieces, digest))
                else:
                    fields[part.name] = _text(part.pieces, part.name)
            if size < 0:
                raise InvalidInput("file is missing; send it as a part of the form.", param="file")
            purpose, kept_s = openai.parse_upload(fields)
            for told in (name, *(f"{key}={value}" for key, value in sorted(fields.items()))):
                digest.update(b"\0" + told.encode())
            now = time.time()
            expires = None if kept_s is None else now + kept_s
            return Upload(named, account, purpose, name, size, now, blob, expires, digest.hexdigest())

        made = await pour(request, kept, batches.terms.file_bytes + FORM_BYTES, batches.pool)
        found = await batches.upload(made)
        if found.blob != made.blob or found.print != made.print:
            if found.blob != made.blob:
                await batches.aside(files.delete, made.blob)
            if found.print != made.print:
                raise KeyReused
        answer = _shown(found)
        if there is not None:
            answer.headers["Idempotent-Replayed"] = "true"
        return answer

    async def list(self, request: Request) -> Response:
        query = request.query_params
        purpose, after, limit, oldest_first = openai.parse_files_page(query)
        batches, account = self._exchange.gateway.batches, request.state.account
        found = await batches.files_page(
            account, purpose=purpose, after=after, limit=limit + 1, oldest_first=oldest_first
        )
        return json_answer(openai.render_list([_file(one) for one in found[:limit]], len(found) > limit))

    async def get(self, request: Request) -> Response:
        return _shown(await self._found(request))

    async def delete(self, request: Request) -> Response:
        found = await self._found(request)
        await self._exchange.gateway.batches.drop(found)
        return json_answer(openai.render_deleted(f"file-{found.id}"))

    async def content(self, request: Request) -> Response:
        found, batches = await self._found(request), self._exchange.gateway.batches
        return await blob_answer(request, batches.files(), found.blob, JSONL, batches.aside)

    async def _found(self, request: Request) -> Upload:
        return await find_file(self._exchange, request, request.path_params["file_id"])


async def find_file(exchange: Exchange, request: Request, file_id: str) -> Upload:
    """Raises `NotFound`."""
    found = await exchange.gateway.batches.file(request.state.account, openai.file_key(file_id))
    if found is None:
        raise openai.no_file(file_id)
    return found


def _hashed(pieces: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for piece in pieces:
        digest.update(piece)
        yield piece


def _text(pieces: Iterator[bytes], name: str) -> str:
    data = b""
    for piece in pieces:
        data += piece
        if len(data) > FORM_BYTES:
            raise InvalidInput(f"{name[:64]} is too long.", param=name[:64])
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{name[:64]} must be text in UTF-8.", param=name[:64]) from None


def _file(found: Upload) -> dict[str, object]:
    return openai.render_file(
        f"file-{found.id}",
        size=found.size,
        created=found.created,
        name=found.name,
        purpose=found.purpose,
        expires=found.expires,
    )


def _shown(found: Upload) -> Response:
    return json_answer(_file(found))
