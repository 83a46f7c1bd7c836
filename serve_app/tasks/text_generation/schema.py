"""JSON Schemas of text generation, as `GET /ai/models/schema` shows them."""

from __future__ import annotations

from serve_app.api.fields.content import PartKind
from serve_app.api.fields.files import file_schema
from serve_app.api.schema.parts import Schema, field, generation_fields, messages_field, object_, usage_schema
from serve_app.api.types import ModelLimits
from serve_app.tasks.text_generation import decide


def input_schema(limits: ModelLimits) -> Schema:
    common = generation_fields(limits)
    prompt = {
        "prompt": field("string", "What the model answers to.", minLength=1),
        "raw": field("boolean", "Sends the prompt without the chat template.", default=False),
    }
    files: dict[PartKind, Schema] = {
        "image": file_schema("A picture, which goes before the last words of the user."),
        "audio": file_schema("A sound, which goes before the last words of the user."),
    }
    shown: Schema = {str(kind): schema for kind, schema in files.items() if kind in limits.takes}
    chat = messages_field(limits.takes) | shown
    return {
        "type": "object",
        "oneOf": [
            {"title": "Prompt", **object_({**prompt, **shown, **common}, ["prompt"])},
            {"title": "Messages", **object_({**chat, **common}, ["messages"])},
            {"title": "Decisions", **decide.input_schema()},
        ],
    }


def output_schema() -> Schema:
    call = object_({"id": {"type": "string"}, "name": {"type": "string"}, "arguments": {"type": "object"}}, ["name"])
    answer = object_(
        {
            "response": field(["string", "object", "array"], "The answer; in JSON mode the object or array itself."),
            "tool_calls": {"type": "array", "items": call},
            "finish_reason": {"type": "string", "enum": ["stop", "length", "tool_calls"]},
            "usage": usage_schema(),
            "choices": field("array", "The same, and further answers, in OpenAI's shape.", items={"type": "object"}),
        },
        ["response", "usage"],
    )
    stream = {"type": "string", "contentType": "text/event-stream", "format": "binary"}
    return {"oneOf": [answer, stream, decide.output_schema()]}
