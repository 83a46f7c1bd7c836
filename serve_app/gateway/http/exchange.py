"""What every route shares: the steps around a handler, reading the body, finding the model."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.api.errors import ApiError, HeadersTooLarge, as_api_error, envelope
from serve_app.api.fields.body import parse_body, read_bounded
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.core import Gateway
from serve_app.gateway.http import request_id
from serve_app.gateway.http.auth import authenticate
from serve_app.gateway.models import ServedModel

log = logging.getLogger("ray.serve")

Handler = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[ApiError], dict[str, Any]]
ACCOUNT = "/client/v4/accounts/{account}"
TEXT = ("text-generation",)
MAX_HEADER_BYTES = 16 * 1024


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One route. ``scope``: "key" asks for a key of the account in the path, "open" answers anybody.

    ``error_body`` writes errors as the dialect's clients read them.
    """

    method: str
    path: str
    handler: Handler
    about: Operation
    error_body: ErrorBody = envelope
    scope: Literal["key", "open"] = "key"


class Exchange:
    """One gateway as handlers see it; they get Starlette requests that are authenticated already."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def guarded(self, endpoint: Endpoint) -> Handler:
        """The endpoint's handler with authentication before it, and errors turned into answers after it."""

        async def guarded(request: Request) -> Response:
            try:
                if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
                    raise HeadersTooLarge(MAX_HEADER_BYTES)
                if endpoint.scope == "key":
                    account = request.path_params.get("account")
                    request.state.caller = authenticate(request.headers, self.gateway.state.accounts, account)
                    request.state.account = request.state.caller.account
                response = await endpoint.handler(request)
            except ClientDisconnect:
                raise
            except Exception as error:
                return error_answer(error, endpoint.error_body)
            response.headers.update(getattr(request.state, "rate", {}))
            return response

        return guarded

    async def body(self, request: Request, task: str = "") -> dict[str, Any]:
        """The request's JSON object, within the bounds of ``task``."""
        settings = self.gateway.settings
        # A prompt is bounded by a context window; thousands of texts to embed are an ordinary request.
        limit = settings.max_body_bytes if task == "text-generation" else settings.max_embedding_body_bytes
        raw = await read_bounded(request.stream(), request.headers.get("content-length"), limit=limit)
        return parse_body(raw, limit=limit)

    def model(self, request: Request, name: str, tasks: tuple[str, ...] = ()) -> ServedModel:
        """The model that ``request`` names, counted against the rate limit of its task."""
        model = self.gateway.models.find(name, tasks)
        request.state.rate = self.gateway.state.limiter.take(request.state.account, model.record.task)
        return model


def json_answer(body: Any) -> Response:
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def error_answer(error: Exception, error_body: ErrorBody) -> Response:
    shown = as_api_error(error, request_id.current.get())
    if not isinstance(error, ApiError):
        log.error("the request failed", exc_info=error)
    return Response(orjson.dumps(error_body(shown)), shown.status, shown.headers, "application/json")
