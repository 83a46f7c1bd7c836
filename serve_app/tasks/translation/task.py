"""Translation: texts in one language in, the same in another out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import string, texts
from serve_app.api.schema.parts import field, object_
from serve_app.api.types import ModelLimits, TaskRequest
from serve_app.api.workers_ai.read import open_native
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict, written_at_most
from serve_app.tasks.task import Answer, Body, Task
from serve_app.tasks.translation.declaration import DECLARATION
from serve_app.tasks.work import Runtime

MAX_TEXTS = 100
MAX_CHARS = 20_000
# Characters of a language's code or name.
MAX_NAME = 32


@dataclass(slots=True)
class TranslateRequest(TaskRequest):
    """``several``: whether the client sent a list."""

    texts: list[str]
    source: str
    target: str
    several: bool = False


class Translation(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = TranslateRequest

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        text = {"type": "string", "minLength": 1, "maxLength": MAX_CHARS}
        many = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_TEXTS}
        fields = {
            "text": {"description": "What to translate.", "oneOf": [text, many]},
            "source_lang": field("string", "Code or English name of its language.", maxLength=MAX_NAME, default="en"),
            "target_lang": field("string", "Code or English name of the language wanted.", maxLength=MAX_NAME),
            "target_language": field("string", "The same.", maxLength=MAX_NAME),
        }
        either = [{"required": ["target_lang"]}, {"required": ["target_language"]}]
        one = object_({"translated_text": {"type": "string"}}, ["translated_text"])
        several = object_({"translations": {"type": "array", "items": {"type": "string"}}}, ["translations"])
        return {"input": object_(fields, ["text"], anyOf=either), "output": {"type": "object", "oneOf": [one, several]}}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> TranslateRequest:
        return parse_translate(body.json)

    async def run(self, runtime: Runtime, model: ServedModel, request: TranslateRequest, caller: Caller) -> list[str]:
        worst = written_at_most(request.texts)
        busy, facts = request.reject_if_busy, {"texts": len(request.texts)}
        options = {"source": request.source, "target": request.target}
        async with runtime.work(model, caller, reject_if_busy=busy, facts=facts, worst=worst) as work:
            return await predict(runtime, work, [text.encode() for text in request.texts], options)

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: TranslateRequest, result: list[str]
    ) -> Answer:
        return Answer(success({"translations": result} if request.several else {"translated_text": result[0]}))


def parse_translate(body: bytes | dict[str, Any]) -> TranslateRequest:
    """``{text, source_lang, target_lang}``, or IndicTrans' ``{text: [...], target_language}``."""
    body, asked = open_native(body)
    value = body.get("text")
    if value is None:
        raise InvalidInput("Input does not match the model's schema: required: text (a string).", param="text")
    found = texts(value, "text", limit=MAX_TEXTS)
    for text in found:
        if not text or len(text) > MAX_CHARS:
            raise InvalidInput(f"text must have 1 to {MAX_CHARS} characters, got {len(text)}.", param="text")
    target = string(body, "target_lang", limit=MAX_NAME) or string(body, "target_language", limit=MAX_NAME)
    if not target:
        raise InvalidInput(
            "Input does not match the model's schema: required: target_lang (a language's code).", param="target_lang"
        )
    source = string(body, "source_lang", limit=MAX_NAME) or "en"
    return TranslateRequest(found, source, target, isinstance(value, list), **asked)


TASK = Translation()
