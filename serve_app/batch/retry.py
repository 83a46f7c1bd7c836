"""What of an ended batch did not succeed, as a new batch of the same API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import orjson

from serve_app.api.errors import Gone, InvalidInput
from serve_app.batch.apis import anthropic_api, native_api
from serve_app.batch.sheet import Sheet
from serve_app.batch.split import ArrayItems, lines
from serve_app.state.blobs.files import NoFile
from serve_app.state.blobs.uploads import Upload
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch

if TYPE_CHECKING:
    from serve_app.batch.front import Batches


def retried(batches: Batches, batch: Batch, caller: Caller) -> Batch:
    """The new batch. Raises `InvalidInput` where all has succeeded, and `Gone` where the input is no longer there.
    Blocks.
    """
    about, named = orjson.loads(batch.about), uuid.uuid4().hex
    about |= {"retry_of": about.get("id", batch.id)}
    about.pop("print", None)
    try:
        failed = _failed(batches, batch)
        if not failed:
            raise InvalidInput("Every request of this batch has succeeded.", param="batch_id")
        if batch.door == "openai":
            size = batches.files().put(blob := f"files/{named}", _lines(batches, batch, failed))
            name, now = f"retry_of_{batch.id}.jsonl", time.time()
            upload = Upload(named, caller.account, "batch", name, size, now, blob, now + batches.terms.keep_s)
            batches.uploads.add(upload)
            about |= {"id": f"batch_{named}", "input_file_id": f"file-{named}"}
            return batches.accept_now(Sheet(named, batch.door, caller, about), blob, len(failed))
        items = list(_items(batches, batch, failed))
    except NoFile:
        raise Gone("The requests of this batch are no longer there.") from None
    if batch.door == "anthropic":
        about |= {"id": f"msgbatch_{named}"}
        return batches.submit_now(Sheet(named, batch.door, caller, about), anthropic_api(), items, len(items))
    about |= {"id": named}
    api = native_api(caller.account, about["model"])
    return batches.submit_now(Sheet(named, batch.door, caller, about), api, items, len(items))


def _failed(batches: Batches, batch: Batch) -> set[str | int]:
    """Ids of requests, or their numbers where ids may be there twice."""
    if batch.status == "failed":
        raise InvalidInput("The input of this batch was refused; mend it and send it again.", param="batch_id")
    name = batch.errors if batch.door == "openai" else batch.output
    found: set[str | int] = set()
    if not name:
        return found
    for _, row in lines(batches.files().stream(name), 1 << 30):
        told = orjson.loads(row or b"{}")
        if batch.door == "openai":
            found.add(told["custom_id"])
        elif batch.door == "anthropic":
            if told["result"]["type"] != "succeeded":
                found.add(told["custom_id"])
        elif not told["success"]:
            found.add(told["id"])
    return found


def _lines(batches: Batches, batch: Batch, failed: set[str | int]) -> Iterator[bytes]:
    for _, row in lines(batches.files().stream(batch.input), batches.known.longest):
        if row is not None and orjson.loads(row)["custom_id"] in failed:
            yield row + b"\n"


def _items(batches: Batches, batch: Batch, failed: set[str | int]) -> Iterator[bytes]:
    items = ArrayItems("requests", batches.known.longest)
    number = 0
    for piece in batches.files().stream(batch.input):
        for item in items.feed(piece):
            key = orjson.loads(item)["custom_id"] if batch.door == "anthropic" else number
            if key in failed:
                yield item
            number += 1
