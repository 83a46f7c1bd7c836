"""Fine-tunes, on Cloudflare's paths: LoRA adapters that accounts upload. What Cloudflare does not have (one of them,
its status, changes, versions, downloads, deletion) lies beside. Names stand in place of ids everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.adapter_errors import AdapterIncomplete, BadAdapter
from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput, NotFound
from serve_app.api.multipart import stream_multipart
from serve_app.api.schema import dialects as schemas
from serve_app.api.schema import finetunes as shapes
from serve_app.api.schema.openapi import Operation
from serve_app.api.workers_ai import finetunes as workers_ai
from serve_app.gateway.adapters import Adapters, read_small, spool
from serve_app.gateway.http.blobs import blob_answer
from serve_app.gateway.http.exchange import ACCOUNT, RUN, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.pour import pour
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, Adapter, blob

_TAG = "Fine-tunes"
# What stands around the file in its form.
FORM_BYTES = 64 << 10
_TYPES = {CONFIG: "application/json", WEIGHTS: "application/octet-stream"}
_EXAMPLE = {"model": "@cf/pico/pico-instruct", "name": "my-adapter"}


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = FinetuneRoutes(exchange)
    one, many = schemas.enveloped(shapes.finetune()), schemas.listing(shapes.finetune())
    all_, each = ACCOUNT + "/ai/finetunes", ACCOUNT + "/ai/finetunes/{finetune}"
    upload = Operation(
        "Upload one of its two files",
        _TAG,
        one,
        shapes.asset(),
        {"file_name": CONFIG, "file": ""},
        body_type="multipart/form-data",
    )
    download = Operation("One of its files", _TAG, {"type": "string"}, media_type=_TYPES[WEIGHTS])
    listed = [
        ("POST", all_, routes.create, Operation("Create a fine-tune", _TAG, one, shapes.new_finetune(), _EXAMPLE)),
        ("GET", all_, routes.list, Operation("The account's fine-tunes", _TAG, many)),
        ("GET", all_ + "/public", routes.public, Operation("Public ones", _TAG, many, query=shapes.public_query())),
        ("GET", each, routes.get, Operation("A fine-tune", _TAG, one)),
        ("PATCH", each, routes.change, Operation("Change what is told of it", _TAG, one, shapes.changes(), {})),
        ("DELETE", each, routes.delete, Operation("Delete a fine-tune", _TAG, schemas.enveloped({"type": "object"}))),
        ("GET", each + "/status", routes.status, Operation("Whether it can be used", _TAG, one)),
        ("POST", each + "/versions", routes.version, Operation("Open a new version for upload", _TAG, one)),
        ("GET", each + "/finetune-assets/{file}", routes.download, download),
    ]
    looks = [
        Endpoint(method, path, handler, about, scopes=USE if method == "GET" else RUN)
        for method, path, handler, about in listed
    ]
    return [*looks, Endpoint("POST", each + "/finetune-assets", routes.upload, upload, keyed=False)]


class FinetuneRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def _adapters(self) -> Adapters:
        return self._exchange.gateway.adapters

    async def create(self, request: Request) -> Response:
        asked = workers_ai.parse_finetune(await self._exchange.body(request))
        account = request.state.account
        return _shown(await self._adapters.create(account, asked.model, asked.name, asked.description, asked.public))

    async def list(self, request: Request) -> Response:
        return json_answer(success([render(each) for each in await self._adapters.listed(request.state.account)]))

    async def public(self, request: Request) -> Response:
        limit, offset, order = workers_ai.parse_page(request.query_params)
        found = await self._adapters.public(limit, offset, order)
        return json_answer(success([_public(each, request.state.account) for each in found]))

    async def get(self, request: Request) -> Response:
        account = request.state.account
        found = await self._adapters.seen(account, request.path_params["finetune"])
        return json_answer(success(_public(found, account)))

    async def status(self, request: Request) -> Response:
        return await self.get(request)

    async def change(self, request: Request) -> Response:
        description, public = workers_ai.parse_changes(await self._exchange.body(request))
        return _shown(await self._adapters.describe(await self._own(request), description, public))

    async def delete(self, request: Request) -> Response:
        found = await self._own(request)
        await self._adapters.remove(found)
        return json_answer(success({"id": found.id, "deleted": True}))

    async def version(self, request: Request) -> Response:
        return _shown(await self._adapters.open_version(await self._own(request)))

    async def upload(self, request: Request) -> Response:
        """The field `file_name` says which file it is; where it is missing, the name of the part that is the file."""
        content_type = request.headers.get("content-type", "")
        if not content_type.lower().startswith("multipart/form-data"):
            raise InvalidInput("Send multipart/form-data with the fields file and file_name.", param="file")
        found, adapters = await self._own(request), self._adapters
        with TemporaryFile() as file:

            def read(pieces: Iterator[bytes]) -> str:
                return _read(pieces, content_type, file)

            name = await pour(request, read, adapters.bounds.file_bytes + FORM_BYTES, adapters.pool)
            size = file.tell()
            file.seek(0)
            if name == WEIGHTS:
                if size > adapters.bounds.file_bytes:
                    raise BadAdapter(_too_large(size, adapters.bounds.file_bytes), param="file")
                return _shown(await adapters.take_weights(found, file))
            return _shown(await adapters.take_config(found, read_small(iter(lambda: file.read(FORM_BYTES), b""))))

    async def download(self, request: Request) -> Response:
        name, found = request.path_params["file"], await self._own(request)
        if name not in _TYPES:
            raise NotFound(f"A fine-tune has the files {CONFIG} and {WEIGHTS}.", param="file")
        if not found.digest:
            raise AdapterIncomplete(f"The fine-tune {found.name} has no files yet.", param="file")
        files = self._exchange.gateway.state.files
        return await blob_answer(request, files, blob(found.digest, name), _TYPES[name], self._adapters.aside, name)

    async def _own(self, request: Request) -> Adapter:
        return await self._adapters.own(request.state.account, request.path_params["finetune"])


def render(adapter: Adapter) -> dict[str, Any]:
    """As its owner sees it. ``upload``: the version that is being uploaded, None for none."""
    upload = {
        "version": adapter.version + 1,
        "missing": list(adapter.missing),
        "problem": adapter.problem or None,
    }
    return workers_ai.render_finetune(
        id=adapter.id,
        model=adapter.model,
        name=adapter.name,
        description=adapter.description,
        public=adapter.public,
        created=adapter.created,
        modified=adapter.modified,
        status=adapter.status,
        version=adapter.version,
        rank=adapter.rank,
        size=adapter.size,
        digest=adapter.digest,
        upload=upload if adapter.opened else None,
    )


def _public(adapter: Adapter, account: str) -> dict[str, Any]:
    """What others upload is their own business."""
    return {**render(adapter), **({} if adapter.account == account else {"upload": None})}


def _shown(adapter: Adapter) -> Response:
    return json_answer(success(render(adapter)))


def _read(pieces: Iterator[bytes], content_type: str, file: BinaryIO) -> str:
    """Writes the form's file; which one it is."""
    named, filename, there = "", "", False
    for part in stream_multipart(pieces, content_type):
        if part.name == "file":
            if there:
                raise InvalidInput("Send one file in each request.", param="file")
            there, filename = True, part.filename
            spool(part.pieces, file)
        elif part.name == "file_name":
            named = b"".join(part.pieces)[:FORM_BYTES].decode(errors="replace").strip()
    if not there:
        raise InvalidInput("file is missing; send it as a part of the form.", param="file")
    named = named or filename
    if named in _TYPES:
        return named
    if named.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
        raise BadAdapter(
            f"{named[:100]} is a pickle, which can run code. Save the adapter with safe_serialization=True, and upload "
            f"{WEIGHTS}.",
            param="file_name",
        )
    raise BadAdapter(f"file_name is {CONFIG} or {WEIGHTS}, not {named[:100]!r}.", param="file_name")


def _too_large(size: int, most: int) -> str:
    return f"{WEIGHTS} has {size} bytes; at most {most} are taken. Train with a smaller rank, or save in bfloat16."
