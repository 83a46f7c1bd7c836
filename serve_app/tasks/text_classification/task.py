"""Text classification: a text in, a score for each class out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import string
from serve_app.api.types import ModelLimits, TaskRequest
from serve_app.api.workers_ai.read import open_native
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.encoding import estimate_reading, tokenise
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict
from serve_app.tasks.task import Answer, Body, Task
from serve_app.tasks.text_classification.declaration import DECLARATION
from serve_app.tasks.text_classification.schema import input_schema, output_schema
from serve_app.tasks.work import Runtime


@dataclass(slots=True)
class ClassifyTextRequest(TaskRequest):
    text: str


class TextClassification(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = ClassifyTextRequest

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> ClassifyTextRequest:
        return parse_text(body.json)

    async def run(
        self, runtime: Runtime, model: ServedModel, request: ClassifyTextRequest, caller: Caller
    ) -> list[dict[str, Any]]:
        ids = await _ids(model, request)
        busy, facts, worst = request.reject_if_busy, {"prompt_tokens": len(ids)}, {"input_tokens": len(ids)}
        async with runtime.work(model, caller, reject_if_busy=busy, facts=facts, worst=worst) as work:
            found: list[list[dict[str, Any]]] = await predict(runtime, work, [ids.tobytes()], {}, tokens=len(ids))
        return found[0]

    async def estimate(
        self, runtime: Runtime, model: ServedModel, request: ClassifyTextRequest, caller: Caller
    ) -> Estimate:
        return estimate_reading(runtime, model, [await _ids(model, request)])

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: ClassifyTextRequest, result: list[dict[str, Any]]
    ) -> Answer:
        return Answer(success(result))


def parse_text(body: bytes | dict[str, Any]) -> ClassifyTextRequest:
    """``{text}``."""
    body, asked = open_native(body)
    text = string(body, "text")
    if not text:
        message = "Input does not match the model's schema: required: text (a non-empty string)."
        raise InvalidInput(message, param="text")
    return ClassifyTextRequest(text, **asked)


async def _ids(model: ServedModel, request: ClassifyTextRequest) -> np.ndarray:
    """The text as the model reads it, int32. Raises `InputTooLong`."""
    [ids] = await tokenise(model, model.tokenizer.encode_batch, [request.text])
    return ids


TASK = TextClassification()
