"""Image to text: a picture and a prompt in, what the model says of it out. A model that sees answers as it does in
chats, with another native body; OpenAI's and other dialects take it for what it is.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from serve_app.api.collect import collect
from serve_app.api.decisions import DecideRequest, Decisions
from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.files import file_schema, read_file
from serve_app.api.schema.parts import field, object_, sampling_fields
from serve_app.api.types import Event, GenerateRequest, ModelLimits
from serve_app.tasks.image_to_text.declaration import DECLARATION
from serve_app.tasks.model import ServedModel
from serve_app.tasks.task import Answer, Body, BodyLimits
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.tasks.text_generation.task import TextGeneration
from serve_app.tasks.work import Runtime

# What is asked where the body is a picture alone.
PROMPT = "What do you see?"
# Tokens of a description.
MAX_TOKENS = 512
# What only chats have, by the field that asks for it, and values that ask for nothing.
_CHAT = ("messages", "questions", "stream", "tools")
_NOTHING: tuple[Any, ...] = (None, False, [], "")


class ImageToText(TextGeneration):
    declaration: ClassVar = DECLARATION
    bodies: ClassVar = frozenset({"json", "bytes"})

    def body_limit(self, settings: BodyLimits) -> int:
        return settings.max_media_body_bytes

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        limits = limits or ModelLimits()
        fields = {
            "image": file_schema("A picture."),
            "prompt": field("string", "What is asked about it.", minLength=1, default=PROMPT),
            **sampling_fields(limits),
        }
        fields["max_tokens"] = {**fields["max_tokens"], "default": MAX_TOKENS}
        answer = object_({"description": {"type": "string"}}, ["description"])
        return {"input": object_(fields, ["image"]), "output": answer}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> GenerateRequest:
        return parse_describe(body, model.id, limits)

    async def answer(
        self,
        runtime: Runtime,
        model: ServedModel,
        request: GenerateRequest | DecideRequest,
        result: tuple[AsyncIterator[Event], int] | Decisions,
    ) -> Answer:
        assert isinstance(result, tuple)
        choices, _ = collect([event async for event in result[0]])
        return Answer(success({"description": choices[0].text.strip()}))


def parse_describe(body: Body, model: str, limits: ModelLimits) -> GenerateRequest:
    """A picture as the body, or ``{image, prompt, max_tokens, ...}``."""
    given = dict(body.json)
    for name in _CHAT:
        if given.pop(name, None) not in _NOTHING:
            raise _for_chats(name)
    if given.get("max_completion_tokens") is None:
        given["max_tokens"] = MAX_TOKENS if given.get("max_tokens") is None else given["max_tokens"]
    picture = read_file(body.data, given, "image")
    asked = given.get("prompt")
    given["prompt"] = PROMPT if asked in (None, "") else asked
    request = parse_generate({**given, "image": base64.b64encode(picture).decode()}, model, limits)
    if request.n > 1:
        raise _for_chats("n")
    return request


def _for_chats(name: str) -> InvalidInput:
    told = f"{name} is not for descriptions of pictures: send it to /v1/chat/completions with the same model."
    return InvalidInput(told, param=name)


TASK = ImageToText()
