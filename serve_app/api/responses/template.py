"""Prompt templates of the Responses dialect: `prompt` names one, and says what stands for its variables.

What is put in for a variable is people's text like any other: it can spell neither a variable nor a control token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import refuse, string, text

MAX_VARIABLES = 256
ID_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_-]{0,63})\s*\}\}", re.ASCII)


@dataclass(slots=True, frozen=True)
class PromptReference:
    """The body's ``prompt``."""

    id: str
    version: str | None
    variables: Mapping[str, str]

    @property
    def shown(self) -> dict[str, Any]:
        return {"id": self.id, "version": self.version, "variables": dict(self.variables)}


def parse_reference(body: dict[str, Any]) -> PromptReference | None:
    """Raises `InvalidInput`."""
    prompt = body.get("prompt")
    if prompt is None:
        return None
    if not isinstance(prompt, dict):
        raise refuse("prompt", "an object with the id of a template", prompt)
    named = text(prompt.get("id"), "prompt.id")
    if not re.fullmatch(ID_PATTERN, named) or named.endswith("\n"):
        raise InvalidInput("prompt.id must be 1 to 64 letters, digits, _ or -.", param="prompt.id")
    version = string(prompt, "version", limit=64)
    given = prompt.get("variables")
    if given is not None and not isinstance(given, dict):
        raise refuse("prompt.variables", "an object", given)
    if len(given or {}) > MAX_VARIABLES:
        raise InvalidInput(f"prompt.variables must have at most {MAX_VARIABLES} entries.", param="prompt.variables")
    return PromptReference(named, version, {name: _value(name, value) for name, value in (given or {}).items()})


def _value(name: str, value: Any) -> str:
    where = f"prompt.variables.{name}"[:80]
    if not isinstance(value, dict):
        return text(value, where)
    if value.get("type") != "input_text":
        raise InvalidInput(f"{where}: only text can stand for a variable; others are not supported.", param=where)
    return text(value.get("text"), f"{where}.text")


def with_template(
    body: dict[str, Any],
    reference: PromptReference,
    instructions: str | None,
    messages: list[dict[str, str]],
    defaults: Mapping[str, Any],
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """``body`` with what the template says unless the body does, and the template's ``messages``, both with variables
    put in. Raises `InvalidInput` for a variable that has no value, and for a value without a variable.
    """
    texts = [instructions or "", *(message["content"] for message in messages)]
    known = {found[1] for one in texts for found in VARIABLE.finditer(one)}
    if missing := sorted(known - reference.variables.keys()):
        listed = ", ".join(missing)
        raise InvalidInput(f"prompt.variables lacks {listed}, which the template needs.", param="prompt.variables")
    if strange := sorted(reference.variables.keys() - known):
        message = f"prompt.variables: the template has no variable {strange[0][:64]}."
        raise InvalidInput(message, param="prompt.variables")

    def fill(one: str) -> str:
        return VARIABLE.sub(lambda found: reference.variables[found[1]], one)

    said = {name: value for name, value in body.items() if value is not None}
    filled = {} if instructions is None else {"instructions": fill(instructions)}
    return {**defaults, **filled, **said}, [{**message, "content": fill(message["content"])} for message in messages]
