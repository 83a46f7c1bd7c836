"""Requests of batches, run by the handlers of their routes: every task, model and dialect, and their own errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from serve_app.api import identity
from serve_app.api.errors import ApiError, Internal, InvalidInput, Timeout, WorkersLost
from serve_app.batch.job import Done, Job, Perform
from serve_app.batch.pace import LEAST
from serve_app.gateway.booking import kept_with_answer
from serve_app.gateway.http import request_id
from serve_app.gateway.http.exchange import Endpoint, error_answer, estimated
from serve_app.gateway.http.inside import Inside
from serve_app.state.callers.accounts import Caller
from serve_app.state.spending.ledger import Entry
from serve_app.tasks.estimate import Estimated

log = logging.getLogger("ray.serve")

# Results of batches are lines of JSON.
_JSON = [(b"content-type", b"application/json"), (b"accept", b"application/json")]
# What a batch has no use for: its answers are whole, and are waited for by nobody.
_ALONE = ("stream", "stream_options", "background")
# Before another try of what failed for no reason of its own.
AGAIN_S = 1.0


def performer(
    listed: Sequence[Endpoint], today: Callable[[Caller], Caller], share: Callable[[str], float] = lambda model: LEAST
) -> Perform:
    """Runs jobs by these endpoints. ``today``: a caller with the limits it has by now. ``share``: of a worker's time,
    what requests of batches for a model get at least.
    """
    inside = Inside((Route(e.path, e.handler, methods=[e.method]), e) for e in listed)

    async def perform(job: Job) -> Done:
        entries: list[Entry] = []
        request_id.current.set(job.request_id)
        kept = dict(job.request.kept)
        known = identity.Identity(job.request_id, job.created, batch=job.batch, bound=not job.alone, kept=kept)
        identity.current.set(known)
        kept_with_answer.set(entries)
        endpoint = None
        try:
            caller = replace(today(job.caller), priority="batch", share=share(job.model))
            request, endpoint = inside.post(job.request.url, _whole(job.request.body), caller, headers=_JSON)
            response = await endpoint.handler(request)
            if isinstance(response, StreamingResponse):
                raise InvalidInput("A request of a batch has no stream; leave stream out.", param="stream")
        except Estimated as asked:
            assert endpoint is not None
            response = estimated(asked, endpoint.error_body)
        except Exception as error:
            return _failed(error, endpoint)
        return Done(response.status_code, bytes(response.body), entries)

    return perform


def _whole(body: bytes) -> bytes:
    """The body without what asks for a stream."""
    if not any(b'"%s"' % name.encode() in body for name in _ALONE):
        return body
    try:
        read: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(read, dict):
        return body
    return orjson.dumps({name: value for name, value in read.items() if name not in _ALONE})


def _failed(error: Exception, endpoint: Endpoint | None) -> Done:
    response: Response = error_answer(error, endpoint.error_body) if endpoint else error_answer(error)
    found = Done(response.status_code, bytes(response.body))
    if not isinstance(error, ApiError) or isinstance(error, (Internal, Timeout)):
        return replace(found, retry_after=AGAIN_S, at_fault=True)
    if error.status in (429, 503) or error.retry_after is not None:
        lost = isinstance(error, WorkersLost)
        return replace(found, retry_after=error.retry_after or AGAIN_S, at_fault=lost)
    return found
