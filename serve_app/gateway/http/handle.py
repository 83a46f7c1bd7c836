"""Resumable streams of the Python handle: native requests as if they had come by HTTP, so that any gateway goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Message

from serve_app.api import identity
from serve_app.api.errors import NotFound
from serve_app.gateway.core import Gateway
from serve_app.gateway.http import request_id
from serve_app.gateway.http.resumable import launch
from serve_app.gateway.resume.log import number_of, split
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimated
from serve_app.tasks.task import Answer, Body

# The number of a frame, and the frame.
Numbered = tuple[int, dict[str, Any]]


async def follow(
    gateway: Gateway, name: str, inputs: dict[str, Any], stream_id: str, after: int
) -> AsyncIterator[Numbered]:
    """The native stream of that id beyond its first ``after`` frames, wherever it runs; begins it if nobody has. An
    error is the last frame: an envelope with its ``status``.

    ``stream_id``: 32 hex digits that the caller has drawn, so that it can ask again whatever it has heard. ``inputs``
    have ``resumable`` in their options; without it the frames of this very call are all there are.
    """
    caller = gateway.own()
    request_id.current.set(stream_id)
    try:
        try:
            reading = await gateway.streams.frames(caller.account, stream_id, after)
        except NotFound:
            if after:
                raise
            begun = await _begin(gateway, name, inputs, stream_id, caller)
            if not isinstance(begun, str):
                async for numbered in begun:
                    yield numbered
                return
            reading = await gateway.streams.frames(caller.account, stream_id, 0)
        async for made in reading:
            for frame in split(made):
                data = next((line[6:] for line in frame.splitlines() if line.startswith(b"data: ")), b"[DONE]")
                if data != b"[DONE]":
                    yield number_of(frame), orjson.loads(data)
    except Estimated as asked:
        yield 0, asked.estimate.shown()
    except Exception as error:
        yield 0, gateway.failure(error, stream_id)


async def _begin(
    gateway: Gateway, name: str, inputs: dict[str, Any], stream_id: str, caller: Caller
) -> str | AsyncIterator[Numbered]:
    """The id of a stream that has begun, or the frames of an answer that cannot be resumed."""
    identity.current.set(identity.Identity(stream_id, time.time()))
    inputs = {**inputs, "stream": True}
    result = await gateway.run(name, Body(inputs), caller)
    if isinstance(result, Answer):
        return _numbered(_once(result.body["result"]))
    if result.resumable_s is None:
        return _numbered(result.values(result.events))
    raw = orjson.dumps(inputs, option=orjson.OPT_SERIALIZE_NUMPY)

    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    # Whoever runs it again finds its route by this.
    path = f"/client/v4/accounts/{caller.account}/ai/run/{name}"
    headers = [(b"content-type", b"application/json")]
    request = Request(
        {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}, receive
    )
    request.state.caller, request.state.account, request.state.raw_body = caller, caller.account, raw
    keep_s = min(result.resumable_s, gateway.streams.keep_max_s)
    return await launch(gateway.streams, request, result.events, result.frames, keep_s, first=True)


async def _once(value: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield value


async def _numbered(frames: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Numbered]:
    async for frame in frames:
        yield 0, frame
