"""What every route shares: the steps around a handler, reading the body, finding the model."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.api import identity
from serve_app.api.envelopes import envelope, status_of, success
from serve_app.api.errors import ApiError, BodyTooLarge, HeadersTooLarge, InvalidInput, StoreAway, as_api_error
from serve_app.api.fields.values import string
from serve_app.api.multipart import BodyPart, write_multipart
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import Event, GenerateRequest, TaskRequest
from serve_app.gateway import canary
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.address import is_local
from serve_app.gateway.http.auth import authenticate, has_key
from serve_app.gateway.http.bodies import read_body
from serve_app.gateway.http.idempotent import HEADER, once
from serve_app.gateway.http.in_turns import InTurns
from serve_app.gateway.http.resumable import resumable
from serve_app.gateway.http.session import signed_in
from serve_app.gateway.http.streams import streamed
from serve_app.gateway.models import up
from serve_app.state.callers.accounts import Scope
from serve_app.state.errors import Away
from serve_app.tasks.estimate import Estimated
from serve_app.tasks.model import ServedModel
from serve_app.tasks.registry import body_limit, taking, tasks
from serve_app.tasks.task import Answer, Body

log = logging.getLogger("ray.serve")

Handler = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[ApiError], dict[str, Any]]
ACCOUNT = "/client/v4/accounts/{account}"
MAX_HEADER_BYTES = 16 * 1024
# What keys need, by what a route does. Lists and what belongs to running models are for both.
RUN: tuple[Scope, ...] = ("inference",)
USE: tuple[Scope, ...] = ("inference", "read")
READ: tuple[Scope, ...] = ("read",)
ADMIN: tuple[Scope, ...] = ("admin",)


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One route. ``scopes``: what a key of the account in the path needs, any of them; none: any key; None: no key.
    ``operated``: admins of the account of the settings may name any account.

    ``locally``: asks for no key of processes of this machine, where the settings say so.

    ``error_body`` writes errors as the dialect's clients read them. ``keyed``: an `Idempotency-Key` is looked after
    here; otherwise by the handler.
    """

    method: str
    path: str
    handler: Handler
    about: Operation
    error_body: ErrorBody = envelope
    scopes: Collection[Scope] | None = RUN
    operated: bool = False
    keyed: bool = True
    locally: bool = False


class Exchange:
    """One gateway as handlers see it; they get Starlette requests that are authenticated already."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._large = InTurns()

    def guarded(self, endpoint: Endpoint) -> Handler:
        """The endpoint's handler with authentication before it, and errors turned into answers after it."""

        async def guarded(request: Request) -> Response:
            try:
                if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
                    raise HeadersTooLarge(MAX_HEADER_BYTES)
                is_open = endpoint.locally and self.gateway.settings.metrics_open and is_local(request)
                if endpoint.scopes is not None and not is_open:
                    account = request.path_params.get("account")
                    operator = self.gateway.settings.account if endpoint.operated else None
                    book, headers = self.gateway.state.accounts, request.headers
                    person = None if has_key(headers) else await signed_in(self.gateway, request)
                    caller = authenticate(headers, book, account, endpoint.scopes, operator=operator, signed_in=person)
                    request.state.caller, request.state.account = caller, caller.account
                # Answers that hold a new key are kept nowhere.
                runs = endpoint.keyed and endpoint.method == "POST" and "inference" in (endpoint.scopes or ())
                if runs and HEADER in request.headers:
                    response = await once(self.gateway, request, endpoint.handler)
                else:
                    response = await endpoint.handler(request)
            except ClientDisconnect:
                raise
            except Estimated as asked:
                response = estimated(asked, endpoint.error_body)
            except Exception as error:
                return error_answer(error, endpoint.error_body)
            response.headers.update(getattr(request.state, "rate", {}))
            return response

        return guarded

    async def body(self, request: Request, takes: type[TaskRequest] = TaskRequest) -> dict[str, Any]:
        """The request's JSON object, within the bounds of the tasks that run such requests."""
        fitting = taking(takes) or list(tasks().values())
        limit = max(task.body_limit(self.gateway.settings) for task in fitting)
        names = {task.declaration.name for task in fitting}
        # Which model is meant stands in the body; one that may be smaller is refused where the model is looked up.
        limits = (body_limit(m, self.gateway.settings) for m in self.gateway.models if m.record.task in names)
        request.state.asked = (await read_body(request, max(limit, *limits, 0), self._large)).json
        return request.state.asked

    async def native_body(self, request: Request, name: str, most: int = 0) -> Body:
        """The body as the model's task takes it, up to ``most`` bytes at least; a JSON object for a model that is not
        here.
        """
        model = self.gateway.models.get(name)
        if model is None:
            return Body(await self.body(request))
        limit = max(most, body_limit(model, self.gateway.settings))
        return await read_body(request, limit, self._large, tasks()[model.record.task].bodies)

    async def form(self, request: Request, takes: type[TaskRequest]) -> list[BodyPart]:
        """The parts of a form, within the bounds of the tasks that run such requests. Raises `InvalidInput`."""
        return await self.parts(request, max(task.body_limit(self.gateway.settings) for task in taking(takes)))

    async def parts(self, request: Request, limit: int | None = None) -> list[BodyPart]:
        """The parts of a form of at most ``limit`` bytes, by default those of a file. Raises `InvalidInput`."""
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
            raise InvalidInput("Send a form: the body must be multipart/form-data.")
        most = self.gateway.settings.max_media_body_bytes if limit is None else limit
        return (await read_body(request, most, self._large, {"multipart"})).parts

    def check_size(self, request: Request, name: str) -> None:
        """Raises `BodyTooLarge` for what has been read and is more than the model's task takes."""
        if (model := self.gateway.models.get(name)) is not None:
            self._check_size(request, model)

    def _check_size(self, request: Request, model: ServedModel) -> None:
        limit = body_limit(model, self.gateway.settings)
        if len(getattr(request.state, "raw_body", b"")) > limit:
            raise BodyTooLarge(limit)

    async def model(
        self, request: Request, name: str, takes: type[TaskRequest] | None = None, *, ready: bool = True
    ) -> ServedModel:
        """The model that ``request`` names or its canary, which must run requests of the type ``takes``; counted
        against the limits of requests of its caller. Raises `PaidPlanNeeded` where its caller may not use it.
        ``ready``: at once; otherwise whoever runs it later has the choice.
        """
        fitting = () if takes is None else tuple(task.declaration.name for task in taking(takes))
        models = self.gateway.models
        model = models.named(name, fitting)
        if ready:
            asked = getattr(request.state, "asked", {})
            model = up(canary.version(models, model, name, asked, request.headers, request.state.caller), name)
        if takes is GenerateRequest:
            self._check_size(request, model)
        # A request that is run again has been counted.
        if not identity.again():
            allowance, caller = self.gateway.state.allowance, request.state.caller
            allowance.check_plan(caller, model.id, paid=bool(model.record.properties.require_workers_paid))
            # Those of a batch come when there is room for them, however many a minute.
            if not identity.batch():
                request.state.rate = await allowance.request(caller, model.record.task)
        return model

    async def only_model(self, request: Request, body: dict[str, Any], takes: type[TaskRequest] | None) -> ServedModel:
        """:meth:`model` for APIs of servers with one model, whose clients need not name it in ``body``: then it is the
        only one here that runs such requests. ``takes`` None: of a model that is named, whatever it does."""
        name = string(body, "model", limit=512)
        if not name:
            tasks_of = {task.declaration.name for task in taking(takes or TaskRequest)}
            fitting = [model for model in self.gateway.models if model.record.task in tasks_of]
            # Of several the one that is always there.
            always = [model for model in fitting if not model.scales_to_zero]
            found = [model.id for model in (always if len(always) == 1 else fitting)]
            if len(found) != 1:
                listed = ", ".join(found[:8]) or "none that would fit"
                raise InvalidInput(f"model is missing; name one of the models here: {listed}.", param="model")
            name = found[0]
        return await self.model(request, name, takes)

    async def streamed(
        self,
        request: Request,
        events: AsyncIterator[Event],
        frames: Callable[[AsyncIterator[Event]], AsyncIterator[bytes]],
        waiting: Callable[[], str] = lambda: "",
        resumable_s: float | None = None,
    ) -> Response:
        """The answer that streams ``frames`` of ``events``: see :func:`~serve_app.gateway.http.streams.streamed`. With
        ``resumable_s`` it goes on for so long without its client.
        """
        if resumable_s is None:
            return await streamed(events, frames, waiting)
        return await resumable(self.gateway.streams, request, events, frames, waiting, resumable_s)


def json_answer(body: Any) -> Response:
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def written(answer: Answer) -> Response:
    """A task's answer: JSON, bytes or parts."""
    if isinstance(answer.body, bytes):
        return Response(answer.body, media_type=answer.media_type)
    if isinstance(answer.body, list) and answer.media_type.startswith("multipart/"):
        body, media_type = write_multipart(answer.body)
        return Response(body, headers={"Content-Type": media_type})
    return json_answer(answer.body)


def estimated(asked: Estimated, error_body: ErrorBody) -> Response:
    """What a request would cost, in the words of its dialect."""
    shown = asked.estimate.shown()
    return json_answer(success(shown) if error_body is envelope else shown)


def error_answer(error: Exception, error_body: ErrorBody = envelope) -> Response:
    if isinstance(error, Away):
        error = StoreAway()
    shown = as_api_error(error)
    if not isinstance(error, ApiError):
        log.error("the request failed", exc_info=error)
    status = status_of(shown, native=error_body is envelope)
    return Response(orjson.dumps(error_body(shown)), status, shown.headers, "application/json")
