"""Summaries: a long text in, a short one out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import Range
from serve_app.api.fields.values import string
from serve_app.api.schema.parts import field, object_, ranged
from serve_app.api.types import ModelLimits, TaskRequest
from serve_app.api.workers_ai.read import open_native
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict, written_at_most
from serve_app.tasks.summarization.declaration import DECLARATION
from serve_app.tasks.task import Answer, Body, Task
from serve_app.tasks.work import Runtime

# Tokens of a summary.
LENGTH = Range(1, 1024)
MAX_CHARS = 200_000


@dataclass(slots=True)
class SummariseRequest(TaskRequest):
    """``max_length``: tokens of the summary; None: as the model has it."""

    text: str
    max_length: int | None = None


class Summarisation(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = SummariseRequest

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        fields = {
            "input_text": field("string", "What to summarise.", minLength=1, maxLength=MAX_CHARS),
            "max_length": ranged(LENGTH, "Most tokens of the summary; as the model has it unless given."),
        }
        answer = object_({"summary": {"type": "string"}}, ["summary"])
        return {"input": object_(fields, ["input_text"]), "output": answer}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> SummariseRequest:
        return parse_summarise(body.json)

    async def run(self, runtime: Runtime, model: ServedModel, request: SummariseRequest, caller: Caller) -> str:
        worst = written_at_most([request.text])
        busy, facts = request.reject_if_busy, {"chars": len(request.text)}
        async with runtime.work(model, caller, reject_if_busy=busy, facts=facts, worst=worst) as work:
            options = {"max_length": request.max_length}
            [found] = await predict(runtime, work, [request.text.encode()], options)
        return str(found)

    async def answer(self, runtime: Runtime, model: ServedModel, request: SummariseRequest, result: str) -> Answer:
        return Answer(success({"summary": result.strip()}))


def parse_summarise(body: bytes | dict[str, Any]) -> SummariseRequest:
    """``{input_text, max_length}``."""
    body, asked = open_native(body)
    text = string(body, "input_text", limit=MAX_CHARS)
    if not text:
        message = "Input does not match the model's schema: required: input_text (a non-empty string)."
        raise InvalidInput(message, param="input_text")
    return SummariseRequest(text, LENGTH.read(body, "max_length"), **asked)


TASK = Summarisation()
