"""Batches of native requests as JSON lines, streamed: what the command line and the Python handle send."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator

import orjson
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput, KeyReused
from serve_app.api.schema.openapi import Operation
from serve_app.batch.apis import native_api
from serve_app.batch.sheet import Sheet, batch_id
from serve_app.batch.split import lines
from serve_app.gateway.batch_estimate import asks_estimate, estimate_batch
from serve_app.gateway.http.exchange import ACCOUNT, Endpoint, Exchange, json_answer
from serve_app.gateway.http.idempotent import check_key
from serve_app.gateway.http.pour import begin, pour
from serve_app.gateway.http.routes.deferred.batches import BATCH, shown_answer
from serve_app.state.deferred.batches import Batch

_TAG, _DOOR = "Batches", "python"
# A body of up to so many bytes is checked before it is answered, a larger one by whoever runs it.
INLINE_BYTES = 10_000_000
CREATE = Operation(
    "Run a model's requests as a batch, one JSON object a line",
    _TAG,
    BATCH,
    {"type": "object"},
    {"prompt": "Hello"},
    query={"model": {"type": "string"}},
)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [Endpoint("POST", ACCOUNT + "/ai/batches", LineRoutes(exchange).create, CREATE, keyed=False)]


class LineRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, request: Request) -> Response:
        """One `Idempotency-Key` makes one batch, whose id is drawn from it."""
        batches, caller = self._exchange.gateway.batches, request.state.caller
        name = request.query_params.get("model", "")
        if not name:
            raise InvalidInput("model is missing in the query.", param="model")
        model = await self._exchange.model(request, name, ready=False)
        key = check_key(request)
        named = batch_id(caller, _DOOR, key)
        there = None if key is None else await batches.find(caller.account, named)
        begun = await begin(request, INLINE_BYTES)
        if asks_estimate(request):
            if not begun.whole:
                raise InvalidInput(f"An estimate looks at {INLINE_BYTES} bytes; send the first lines alone.")
            items = await batches.aside(lambda: list(_items([begun.data], batches.known.longest)))
            api = native_api(caller.account, model.id)
            return json_answer(success(await estimate_batch(self._exchange.gateway, api, caller, items)))
        digest, about = hashlib.sha256(model.id.encode()), {"id": named, "model": model.id}
        if begun.whole:
            digest.update(begun.data)
            about["print"] = digest.hexdigest()
            if there is None:
                items = await batches.aside(lambda: list(_items([begun.data], batches.known.longest)))
                if not items:
                    raise InvalidInput("There are no requests: send one JSON object a line.")
                sheet = Sheet(named, _DOOR, caller, about)
                there = await batches.submit(sheet, native_api(caller.account, model.id), items)
            return shown_answer(_same(there, about["print"]))
        blob = f"batches/{named}/input-{uuid.uuid4().hex}.json"
        files, count = batches.files(), 0

        def kept(pieces: Iterator[bytes]) -> None:
            def counted() -> Iterator[bytes]:
                nonlocal count
                for item in _items(_hashed(pieces), batches.known.longest):
                    count += 1
                    if count > batches.known.most:
                        raise InvalidInput(f"A batch has at most {batches.known.most} requests.")
                    yield item

            written = _together(counted())
            if there is None:
                files.put(blob, written)
            else:
                for _ in written:
                    pass

        def _hashed(pieces: Iterator[bytes]) -> Iterator[bytes]:
            for piece in pieces:
                digest.update(piece)
                yield piece

        await pour(request, kept, batches.terms.file_bytes, batches.pool, begun)
        about["print"] = digest.hexdigest()
        if there is None:
            there = await batches.accept(Sheet(named, _DOOR, caller, about), blob, count)
            if there.input != blob:
                await batches.aside(files.delete, blob)
        return shown_answer(_same(there, about["print"]))


def _items(pieces: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Raises `InvalidInput` for a line that is no JSON, by its number."""
    for number, line in lines(pieces, longest):
        if line is None:
            raise InvalidInput(f"Line {number + 1} has more than {longest} bytes.")
        try:
            orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"Line {number + 1} is not valid JSON: {error}.") from None
        yield line.strip()


def _together(items: Iterable[bytes]) -> Iterator[bytes]:
    """As batches have their input, in pieces that are not too small."""
    parts, size, before = [b'{"requests":['], 0, b""
    for item in items:
        parts += (before, item)
        size, before = size + len(item), b","
        if size > 1 << 18:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join([*parts, b"]}"])


def _same(there: Batch, printed: str) -> Batch:
    """Raises `KeyReused` for another one's key."""
    if orjson.loads(there.about).get("print") != printed:
        raise KeyReused
    return there
