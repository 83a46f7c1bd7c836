"""JSON Schemas of the routes about tokens."""

from __future__ import annotations

from serve_app.api.schema.parts import Schema, field, messages_field, object_

_MODEL = field("string", "May be left out where one model generates text.", minLength=1, maxLength=512)
_ID: Schema = {"type": "integer", "minimum": 0}


def tokenize_input() -> Schema:
    common = {"model": _MODEL, "return_token_strs": field("boolean", "Tells the tokens' texts as well.", default=False)}
    text = {
        **common,
        "prompt": field("string", "Read as /v1/completions reads one."),
        "add_special_tokens": field("boolean", "Whether the tokenizer adds its own.", default=True),
    }
    chat = {
        **common,
        **messages_field(),
        "add_generation_prompt": field("boolean", "Whether the model's turn is begun.", default=True),
        "tools": {"type": "array", "items": {"type": "object"}},
    }
    return {"anyOf": [object_(text, ["prompt"]), object_(chat, ["messages"])]}


def tokenize_output() -> Schema:
    strings = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string"}}]}
    window = {"type": ["integer", "null"]}
    fields = {"count": _ID, "max_model_len": window, "tokens": {"type": "array", "items": _ID}, "token_strs": strings}
    return object_(fields, ["count", "max_model_len", "tokens"])


def detokenize_input() -> Schema:
    return object_({"model": _MODEL, "tokens": {"type": "array", "items": _ID}}, ["tokens"])


def detokenize_output() -> Schema:
    return object_({"prompt": {"type": "string"}}, ["prompt"])
