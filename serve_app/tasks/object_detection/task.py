"""Object detection: a picture in, things with their boxes out."""

from __future__ import annotations

from typing import Any, ClassVar

from serve_app.api.envelopes import success
from serve_app.api.fields.files import file_schema
from serve_app.api.fields.ranges import Range
from serve_app.api.schema.parts import object_, ranged
from serve_app.api.types import ModelLimits
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.model import ServedModel
from serve_app.tasks.object_detection.declaration import DECLARATION
from serve_app.tasks.picture import PictureRequest, estimate_picture, look, open_picture
from serve_app.tasks.task import Answer, Body, BodyLimits, Task
from serve_app.tasks.work import Runtime

# What is less likely is not told.
LEAST = 0.5
THRESHOLD = Range(0, 1, whole=False)


class DetectRequest(PictureRequest):
    """What is where on the picture."""


class ObjectDetection(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = DetectRequest
    bodies: ClassVar = frozenset({"json", "bytes"})

    def body_limit(self, settings: BodyLimits) -> int:
        return settings.max_media_body_bytes

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        fields = {
            "image": file_schema("A picture."),
            "threshold": ranged(THRESHOLD, "Least score of what is told.", default=LEAST),
        }
        box = object_({name: {"type": "integer"} for name in ("xmin", "ymin", "xmax", "ymax")})
        thing = object_({"score": {"type": "number"}, "label": {"type": "string"}, "box": box})
        return {"input": object_(fields, ["image"]), "output": {"type": "array", "items": thing}}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> DetectRequest:
        return parse_detect(body)

    async def run(self, runtime: Runtime, model: ServedModel, request: DetectRequest, caller: Caller) -> Any:
        return await look(runtime, model, request, caller)

    async def estimate(self, runtime: Runtime, model: ServedModel, request: DetectRequest, caller: Caller) -> Estimate:
        return estimate_picture(runtime, model)

    async def answer(self, runtime: Runtime, model: ServedModel, request: DetectRequest, result: Any) -> Answer:
        return Answer(success(result))


def parse_detect(body: Body) -> DetectRequest:
    """A picture as the body, or ``{image, threshold}``."""
    image, fields, asked = open_picture(body)
    threshold = THRESHOLD.read(fields, "threshold")
    return DetectRequest(image, {"threshold": LEAST if threshold is None else threshold}, **asked)


TASK = ObjectDetection()
