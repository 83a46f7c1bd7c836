"""Routes of pictures in OpenAI's dialect: `/v1/images/generations`, `/v1/images/edits`."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.drawing import DrawRequest, drawn_by
from serve_app.api.envelopes import openai_body
from serve_app.api.fields.asked import with_headers
from serve_app.api.openai.drawing import events, parse_edit, parse_generation, render
from serve_app.api.openai.read import model_of
from serve_app.api.schema import drawing as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.exchange import Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.gateway.http.streams import streamed
from serve_app.tasks.model import ServedModel

_TAG = "OpenAI"


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = DrawingRoutes(exchange)
    drawing = Operation(
        "Draw pictures", _TAG, schemas.pictures(), schemas.generation_body(), schemas.GENERATION, streams=True
    )
    changing = Operation(
        "Change a picture", _TAG, schemas.pictures(), schemas.edit_form(), schemas.EDIT, streams=True,
        body_type="multipart/form-data",
    )  # fmt: skip
    return [
        endpoint
        for prefix in OPENAI
        for endpoint in (
            Endpoint("POST", prefix + "/images/generations", routes.generate, drawing, openai_body),
            Endpoint("POST", prefix + "/images/edits", routes.edit, changing, openai_body),
        )
    ]


class DrawingRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def generate(self, request: Request) -> Response:
        name, body = model_of(await self._exchange.body(request, DrawRequest))
        model = await self._exchange.model(request, name, DrawRequest)
        return await self._answer(request, model, parse_generation(body, model.record.drawing), "image_generation")

    async def edit(self, request: Request) -> Response:
        name, fields, image, mask = parse_edit(await self._exchange.form(request, DrawRequest))
        model = await self._exchange.model(request, name, DrawRequest)
        asked = replace(parse_generation(fields, model.record.drawing), image=image, mask=mask)
        if fields.get("size") in (None, "", "auto"):
            asked = replace(asked, width=None, height=None)
        return await self._answer(request, model, asked, "image_edit")

    async def _answer(self, request: Request, model: ServedModel, asked: DrawRequest, kind: str) -> Response:
        # Files come as base64 in any case, whatever the client accepts.
        asked = replace(with_headers(asked, request.headers), accept="")
        told = await self._exchange.gateway.perform(model, asked, request.state.caller)
        if asked.stream:
            return await streamed(told, lambda primed: events(asked, primed, kind))
        return json_answer(render(asked, await drawn_by(told)))
