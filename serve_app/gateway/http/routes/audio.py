"""Routes of sound in OpenAI's dialect: `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import openai_body
from serve_app.api.fields.asked import with_headers
from serve_app.api.openai import audio
from serve_app.api.schema import sound as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.transcripts import SpeechTask, TranscribeRequest
from serve_app.gateway.http.exchange import Endpoint, Exchange, Handler
from serve_app.gateway.http.routes.openai import PREFIXES

_TAG = "OpenAI"


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = AudioRoutes(exchange)
    listed: list[tuple[str, SpeechTask, str]] = [
        ("/audio/transcriptions", "transcribe", "Write down what is said"),
        ("/audio/translations", "translate", "Write down in English what is said"),
    ]
    found = []
    for prefix in PREFIXES:
        for path, task, said in listed:
            about = Operation(
                said, _TAG, schemas.transcript(), schemas.transcript_form(task), schemas.EXAMPLE, streams=True,
                body_type="multipart/form-data",
            )  # fmt: skip
            handler: Handler = partial(routes.transcribe, task=task)
            found.append(Endpoint("POST", prefix + path, handler, about, openai_body))
    return found


class AudioRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def transcribe(self, request: Request, *, task: SpeechTask) -> Response:
        form = audio.parse_form(await self._exchange.form(request, TranscribeRequest), task)
        model = await self._exchange.model(request, form.model, TranscribeRequest)
        parsed = with_headers(form.request, request.headers)
        told = await self._exchange.gateway.perform(model, parsed, request.state.caller)
        if form.stream:
            return Response(b"".join(audio.events(told)), media_type="text/event-stream")
        body, media_type = audio.render(form, told)
        return Response(body, headers={"Content-Type": media_type})
