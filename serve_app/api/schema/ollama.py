"""JSON Schemas of Ollama's dialect."""

from __future__ import annotations

from serve_app.api.fields import messages, ranges
from serve_app.api.schema.parts import Schema, field, lora_field, object_, tool_schema

_TEXT: Schema = {"type": "string"}
_MODEL = field("string", "A model of GET /api/tags.", minLength=1, maxLength=512)


def _common() -> Schema:
    options = {
        "num_predict": {"anyOf": [{"enum": [-1, -2]}, ranges.TOKENS.schema]},
        "temperature": ranges.TEMPERATURE.schema,
        "top_k": ranges.TOP_K.schema,
        "top_p": ranges.TOP_P.schema,
        "min_p": ranges.MIN_P.schema,
        "seed": ranges.SEED.schema,
        "repeat_penalty": ranges.REPETITION_PENALTY.schema,
        "presence_penalty": ranges.PENALTY.schema,
        "frequency_penalty": ranges.PENALTY.schema,
        "estimate": field("boolean", "Tells what the request would cost, and does not run it."),
    }
    return {
        "model": _MODEL,
        "stream": field("boolean", "One JSON object a line.", default=True),
        "options": object_(options),
        "format": {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]},
        **lora_field(),
        "think": {"anyOf": [{"type": "boolean"}, {"enum": ["low", "medium", "high"]}]},
    }


def chat_input() -> Schema:
    message = object_({"role": {"enum": [*messages.ROLES]}, "content": _TEXT}, ["role", "content"])
    tool = object_({"type": {"const": "function"}, "function": tool_schema()}, ["type", "function"])
    fields = {
        **_common(),
        "messages": {"type": "array", "items": message, "maxItems": messages.MAX_MESSAGES},
        "tools": {"type": "array", "items": tool, "maxItems": messages.MAX_TOOLS},
    }
    return object_(fields, ["model"])


def generate_input() -> Schema:
    fields = {**_common(), "prompt": _TEXT, "system": _TEXT, "raw": field("boolean", "Without chat template.")}
    return object_(fields, ["model"])


def answer() -> Schema:
    return object_({"model": _TEXT, "created_at": _TEXT, "done": {"type": "boolean"}}, ["model", "created_at", "done"])


def embed_input() -> Schema:
    texts = {"type": "array", "items": {**_TEXT, "minLength": 1}}
    fields = {
        "model": _MODEL,
        "input": {"anyOf": [_TEXT, texts]},
        "truncate": field("boolean", "Cuts long texts.", default=True),
        "dimensions": ranges.DIMENSIONS.schema,
    }
    return object_(fields, ["model", "input"])


def embed_output() -> Schema:
    rows = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    return object_({"model": _TEXT, "embeddings": rows}, ["model", "embeddings"])


def embeddings_input() -> Schema:
    return object_({"model": _MODEL, "prompt": _TEXT}, ["model"])


def embeddings_output() -> Schema:
    return object_({"embedding": {"type": "array", "items": {"type": "number"}}}, ["embedding"])


def show_input() -> Schema:
    return object_({"model": _MODEL}, ["model"])


def models_output() -> Schema:
    return object_({"models": {"type": "array", "items": {"type": "object"}}}, ["models"])
