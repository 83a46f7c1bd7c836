"""What an answer must look like, in all the ways in which clients say it.

``response_format`` (OpenAI; natively with a bare schema, contract of Workers AI's JSON mode), ``guided_json`` and its
siblings (vLLM), ``structured_outputs`` (newer vLLM), ``regex``, ``ebnf`` and ``json_schema`` (SGLang), ``grammar``
(llama.cpp), ``text.format`` (Responses) and ``output_format`` (Anthropic). Whoever asks for a constraint gets it or is
refused; an empty one is refused.
"""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.body import parse_inner
from serve_app.api.fields.values import refuse, text
from serve_app.api.types import AnswerFormat, FormatKind

MAX_TEXT_CHARS = 64 << 10
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
_GUIDED: dict[str, FormatKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json_schema",
}
_STRUCTURED: dict[str, FormatKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


def parse_format(body: dict[str, Any]) -> AnswerFormat | None:
    """The one format that a chat, completion or native body asks for, or None for plain text.

    Raises `InvalidInput` where fields contradict each other or have the wrong shape. Whether a schema or expression can
    be used is found out later, off the event loop (`serve_app.grammar.check`).
    """
    found = [parse_response_format(body.get("response_format"))]
    found += [_value(kind, body[name], name) for name, kind in _GUIDED.items() if body.get(name) is not None]
    structured = body.get("structured_outputs")
    if structured is not None:
        if not isinstance(structured, dict):
            raise refuse("structured_outputs", "an object", structured)
        inner = [_structured(name, value) for name, value in structured.items() if value is not None]
        if not inner:
            message = "structured_outputs holds no constraint; send one, or leave the field out."
            raise InvalidInput(message, param="structured_outputs")
        found += inner
    asked = [form for form in found if form is not None]
    if len(asked) > 1:
        names = " and ".join(form.field for form in asked)
        raise InvalidInput(f"{names} exclude each other; send one of them.", param=asked[1].field)
    return asked[0] if asked else None


def parse_response_format(value: Any, name: str = "response_format") -> AnswerFormat | None:
    """``{"type": "text" | "json_object" | "json_schema"}``; the schema bare, wrapped as ``{"schema": ...}`` or beside
    ``type``."""
    if value is None or value == "text":
        return None
    kinds = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {...}}'
    if not isinstance(value, dict):
        raise refuse(name, f"an object such as {kinds}", value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # Some clients put a schema here.
        return (
            AnswerFormat("json_schema", _schema(value["schema"], name), name)
            if value.get("schema")
            else (AnswerFormat("json_object", None, name))
        )
    if kind != "json_schema":
        raise InvalidInput(f"{name}.type must be one of {kinds}.", param=name)
    given = value.get("json_schema", value.get("schema"))
    if isinstance(given, dict) and isinstance(given.get("schema"), dict):
        given = given["schema"]
    if given is None:
        raise InvalidInput(f"{name} has no schema; send it as json_schema.", param=name)
    return AnswerFormat("json_schema", _schema(given, name), name)


def _structured(name: str, value: Any) -> AnswerFormat | None:
    where = f"structured_outputs.{name}"[:64]
    if name not in _STRUCTURED:
        listed = ", ".join(_STRUCTURED)
        raise InvalidInput(f"{where} is not supported; use one of {listed}.", param=where)
    return _value(_STRUCTURED[name], value, where)


def _value(kind: FormatKind, value: Any, name: str) -> AnswerFormat:
    if kind == "json_object":
        if value is not True:
            raise refuse(name, "true, or left out", value)
        return AnswerFormat(kind, None, name)
    if kind == "json_schema":
        return AnswerFormat(kind, _schema(value, name), name)
    if kind == "choice":
        if not isinstance(value, list):
            raise refuse(name, "an array of strings", value)
        if not 0 < len(value) <= MAX_CHOICES:
            raise InvalidInput(f"{name} must have 1 to {MAX_CHOICES} items, got {len(value)}.", param=name)
        choices = [text(item, f"{name}[{i}]", limit=MAX_CHOICE_CHARS) for i, item in enumerate(value)]
        if not all(choices):
            raise InvalidInput(f"{name} must not hold an empty string.", param=name)
        return AnswerFormat(kind, tuple(choices), name)
    given = text(value, name, limit=MAX_TEXT_CHARS)
    if not given:
        raise InvalidInput(f"{name} is empty; send a constraint, or leave the field out.", param=name)
    return AnswerFormat(kind, given, name)


def _schema(value: Any, name: str) -> dict[str, Any]:
    """A schema, which vLLM's clients may also send as JSON text."""
    if isinstance(value, str):
        try:
            value = parse_inner(text(value, name, limit=MAX_TEXT_CHARS))
        except ValueError as error:
            raise InvalidInput(f"{name} can't be read as JSON: {error}. Send an object.", param=name) from None
    if not isinstance(value, dict):
        raise refuse(name, "a JSON schema (an object)", value)
    return value
