"""Routes of sound in OpenAI's dialect: `/v1/audio/transcriptions`, `/v1/audio/translations`, `/v1/audio/speech`."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import openai_body
from serve_app.api.fields.asked import with_headers
from serve_app.api.openai import audio, speech
from serve_app.api.openai.read import model_of
from serve_app.api.schema import sound as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.speech import MEDIA_TYPES, SpeakRequest
from serve_app.api.transcripts import SpeechTask, TranscribeRequest
from serve_app.gateway.http.exchange import Endpoint, Exchange, Handler
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.gateway.http.streams import streamed
from serve_app.tasks.sound import encoded

_TAG = "OpenAI"


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = AudioRoutes(exchange)
    listed: list[tuple[str, SpeechTask, str]] = [
        ("/audio/transcriptions", "transcribe", "Write down what is said"),
        ("/audio/translations", "translate", "Write down in English what is said"),
    ]
    found = []
    for prefix in OPENAI:
        for path, task, said in listed:
            about = Operation(
                said, _TAG, schemas.transcript(), schemas.transcript_form(task), schemas.EXAMPLE, streams=True,
                body_type="multipart/form-data",
            )  # fmt: skip
            handler: Handler = partial(routes.transcribe, task=task)
            found.append(Endpoint("POST", prefix + path, handler, about, openai_body))
        about = Operation("Say a text", _TAG, schemas.spoken(), schemas.speech_body(), schemas.SPEECH, streams=True)
        found.append(Endpoint("POST", prefix + "/audio/speech", routes.speak, about, openai_body))
    return found


class AudioRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def speak(self, request: Request) -> Response:
        """The sound as it is made, sentence by sentence."""
        name, body = model_of(await self._exchange.body(request, SpeakRequest))
        model = await self._exchange.model(request, name, SpeakRequest)
        asked = speech.parse_speech(body)
        parsed = with_headers(asked.request, request.headers)
        spoken = await self._exchange.gateway.perform(model, parsed, request.state.caller)
        if asked.events:
            return await streamed(spoken, lambda primed: speech.events(encoded(parsed, primed), len(parsed.text)))
        media_type = MEDIA_TYPES[parsed.form]
        return await streamed(spoken, lambda primed: encoded(parsed, primed), media_type=media_type)

    async def transcribe(self, request: Request, *, task: SpeechTask) -> Response:
        form = audio.parse_form(await self._exchange.form(request, TranscribeRequest), task)
        model = await self._exchange.model(request, form.model, TranscribeRequest)
        parsed = with_headers(form.request, request.headers)
        told = await self._exchange.gateway.perform(model, parsed, request.state.caller)
        if form.stream:
            return Response(b"".join(audio.events(told)), media_type="text/event-stream")
        body, media_type = audio.render(form, told)
        return Response(body, headers={"Content-Type": media_type})
