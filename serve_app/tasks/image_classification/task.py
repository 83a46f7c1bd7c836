"""Image classification: a picture in, the likeliest classes out, the model's own or those that the client names."""

from __future__ import annotations

from typing import Any, ClassVar

from serve_app.api.envelopes import success
from serve_app.api.fields.files import file_schema
from serve_app.api.fields.ranges import Range
from serve_app.api.schema.parts import object_, ranged
from serve_app.api.types import ModelLimits
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.candidates import LABELS, candidate_fields, read_candidates
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.image_classification.declaration import DECLARATION
from serve_app.tasks.model import ServedModel
from serve_app.tasks.picture import PictureRequest, estimate_picture, look, open_picture
from serve_app.tasks.task import Answer, Body, BodyLimits, Task
from serve_app.tasks.work import Runtime

# How many classes are told at most.
TOP_K = Range(1, 1000)
# As CLIP was evaluated.
TEMPLATE = "This is a photo of {}."


class ClassifyImageRequest(PictureRequest):
    """What is on the picture."""


class ImageClassification(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = ClassifyImageRequest
    bodies: ClassVar = frozenset({"json", "bytes"})

    def body_limit(self, settings: BodyLimits) -> int:
        return settings.max_media_body_bytes

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        fields = {
            "image": file_schema("A picture."),
            "top_k": ranged(TOP_K, "How many of the likeliest classes to tell: 5, or all that are named."),
            **candidate_fields(TEMPLATE, "models that have none of their own (CLIP, SigLIP)"),
        }
        label = object_({"label": {"type": "string"}, "score": {"type": "number"}}, ["label", "score"])
        return {"input": object_(fields, ["image"]), "output": {"type": "array", "items": label}}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> ClassifyImageRequest:
        return parse_classify(body)

    async def run(self, runtime: Runtime, model: ServedModel, request: ClassifyImageRequest, caller: Caller) -> Any:
        return await look(runtime, model, request, caller)

    async def estimate(
        self, runtime: Runtime, model: ServedModel, request: ClassifyImageRequest, caller: Caller
    ) -> Estimate:
        return estimate_picture(runtime, model)

    async def answer(self, runtime: Runtime, model: ServedModel, request: ClassifyImageRequest, result: Any) -> Answer:
        return Answer(success(result))


def parse_classify(body: Body) -> ClassifyImageRequest:
    """A picture as the body, or ``{image, top_k, candidate_labels, hypothesis_template}``."""
    image, fields, asked = open_picture(body)
    options: dict[str, Any] = {"top_k": TOP_K.read(fields, "top_k")}
    if named := read_candidates(fields, TEMPLATE):
        options |= {LABELS: named.labels, "sentences": named.sentences}
    return ClassifyImageRequest(image, options, **asked)


TASK = ImageClassification()
