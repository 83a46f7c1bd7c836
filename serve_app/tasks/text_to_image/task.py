"""Drawing: a text in, maybe with a picture, and a picture out."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from serve_app.api import sse
from serve_app.api.drawing import MEDIA_TYPES, Drawn, DrawRequest, Progress, drawn_by
from serve_app.api.envelopes import envelope, success
from serve_app.api.errors import as_api_error
from serve_app.api.types import ModelLimits
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimate, Foreseen, estimate_of
from serve_app.tasks.model import ServedModel
from serve_app.tasks.task import Answer, Body, BodyLimits, Streamed, Task
from serve_app.tasks.text_to_image.declaration import DECLARATION
from serve_app.tasks.text_to_image.read import parse_draw
from serve_app.tasks.text_to_image.run import draw, most, units_of
from serve_app.tasks.text_to_image.schema import input_schema, output_schema
from serve_app.tasks.work import Runtime

log = logging.getLogger("ray.serve")

Events = AsyncIterator[Progress | Drawn]


class TextToImage(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = DrawRequest

    def body_limit(self, settings: BodyLimits) -> int:
        return settings.max_media_body_bytes

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> DrawRequest:
        return parse_draw(body.json, model.record.drawing)

    async def run(self, runtime: Runtime, model: ServedModel, request: DrawRequest, caller: Caller) -> Events:
        """Progress, and then the pictures. Closing the iterator ends the work."""
        return draw(runtime, model, request, caller)

    async def estimate(self, runtime: Runtime, model: ServedModel, request: DrawRequest, caller: Caller) -> Estimate:
        """Of a picture that is to be changed the size is not known before: the model's own is usual."""
        side = model.record.drawing.side
        usual = units_of(request, request.width or side, request.height or side)
        least = most(request) if request.width else units_of(request, 1, 1)
        return estimate_of(runtime.quote(model), model, least, usual, most(request), Foreseen())

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: DrawRequest, result: Events
    ) -> Answer | Streamed:
        if request.stream:
            return Streamed(result, _frames, _values)
        drawn = await drawn_by(result)
        if request.as_file:
            return Answer(base64.b64decode(drawn.images[0]), MEDIA_TYPES[request.sent_form])
        return Answer(success({"image": drawn.images[0]}))


async def _values(events: Events) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        if isinstance(event, Progress):
            yield {"step": event.done, "steps": event.steps}
        else:
            yield {"image": event.images[0], "seed": event.seeds[0]}


async def _frames(events: Events) -> AsyncIterator[bytes]:
    """An error is the last frame; no `[DONE]` follows."""
    try:
        async for value in _values(events):
            yield sse.frame(value)
        yield sse.DONE
    except Exception as error:
        shown = as_api_error(error)
        if shown is not error:
            log.error("a stream failed: %s", shown.message, exc_info=error)
        yield sse.frame(envelope(shown))


TASK = TextToImage()
