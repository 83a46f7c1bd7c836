"""Which adapter a body asks for: the field ``lora``, or the model's name with the adapter's behind it."""

from __future__ import annotations

import re
from typing import Any

from serve_app.api.errors import InvalidInput, LoraUnsupported
from serve_app.api.fields.values import string
from serve_app.api.types import ModelLimits

# Also what stands behind a model's name: no slash and no @.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_NAMED = re.compile(rf"(?P<model>.*[^/@])@(?P<adapter>{NAME})", re.ASCII)


def split_model(name: str) -> tuple[str, str]:
    """``@cf/author/base@adapter`` as the model and the adapter's id or name, "" where none is named."""
    found = _NAMED.fullmatch(name)
    return (name, "") if found is None else (found["model"], found["adapter"])


def parse_lora(body: dict[str, Any], model: str, limits: ModelLimits | None = None) -> str:
    """The id or name of an adapter, "" for none. ``model``: as the body or the address names it. Raises
    `LoraUnsupported` where ``limits`` allow none.
    """
    asked = string(body, "lora", limit=200) or ""
    base, named = split_model(model)
    if asked and named and asked != named:
        raise InvalidInput(f"model names the adapter {named} and lora {asked}; name one.", param="lora")
    if (asked or named) and not (limits or ModelLimits()).lora:
        raise LoraUnsupported(base)
    return asked or named


def with_lora(body: dict[str, Any], name: str) -> dict[str, Any]:
    """``body`` that asks for the adapter which the model's ``name`` names, if any."""
    _, named = split_model(name)
    if not named:
        return body
    parse_lora(body, name, ModelLimits(lora=True))
    return {**body, "lora": named}
