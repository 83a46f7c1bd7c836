"""Speech: a text in, sound out, sentence by sentence."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from serve_app.api.envelopes import success
from serve_app.api.speech import MEDIA_TYPES, SpeakRequest, Spoken
from serve_app.api.types import ModelLimits
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimate, Foreseen, estimate_of
from serve_app.tasks.model import ServedModel
from serve_app.tasks.sound import encoded
from serve_app.tasks.task import Answer, Body, Task
from serve_app.tasks.text_to_speech.declaration import DECLARATION
from serve_app.tasks.text_to_speech.read import parse_speak
from serve_app.tasks.text_to_speech.run import most, speak
from serve_app.tasks.text_to_speech.schema import input_schema, output_schema
from serve_app.tasks.work import Runtime


class Speech(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = SpeakRequest

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> SpeakRequest:
        return parse_speak(body.json)

    async def run(
        self, runtime: Runtime, model: ServedModel, request: SpeakRequest, caller: Caller
    ) -> AsyncIterator[Spoken]:
        """The sentences as they are made. Closing the iterator ends the work."""
        return speak(runtime, model, request, caller)

    async def estimate(self, runtime: Runtime, model: ServedModel, request: SpeakRequest, caller: Caller) -> Estimate:
        """How long it takes to say is not known before; a second for fourteen characters is usual."""
        usual = {"characters": len(request.text), "audio_ms": round(len(request.text) * 1000 / 14 / request.speed)}
        least = {"characters": len(request.text)}
        return estimate_of(runtime.quote(model), model, least, usual, most(request), Foreseen())

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: SpeakRequest, result: AsyncIterator[Spoken]
    ) -> Answer:
        sound = b"".join([piece async for piece in encoded(request, result)])
        if request.whole:
            return Answer(success({"audio": base64.b64encode(sound).decode()}))
        return Answer(sound, MEDIA_TYPES[request.form])


TASK = Speech()
