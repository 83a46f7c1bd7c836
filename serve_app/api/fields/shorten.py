"""Whether and how texts that are too long are cut, in the words of the servers whose clients ask for it."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import KEPT_TOKENS
from serve_app.api.fields.values import boolean, choice, refuse
from serve_app.api.types import Shorten, Side


def parse_shorten(body: dict[str, Any], default: Shorten | None = None) -> Shorten | None:
    """How ``body`` wants long texts cut; ``default`` where it does not say, None where they are to be refused.

    Fields: ``truncate`` (true or false, or Cohere's "NONE", "START", "END"), Cloudflare's ``truncate_inputs``, vLLM's
    ``truncate_prompt_tokens`` (tokens to keep, -1 for what the model takes) with ``truncation_side``, and TEI's
    ``truncation_direction``.
    """
    side = _side(body)
    asked = [flag for flag in (_truncate(body), boolean(body, "truncate_inputs")) if flag is not None]
    tokens = parse_kept(body)
    if tokens is None and not asked:
        return None if default is None else Shorten(default.tokens, default.second, side)
    if tokens is None and not any(asked):
        return None
    return Shorten(None if tokens in (None, -1) else tokens, default.second if default else None, side)


def parse_kept(body: dict[str, Any]) -> int | None:
    """vLLM's ``truncate_prompt_tokens``: how many tokens stay, -1 for as many as the model takes."""
    tokens = KEPT_TOKENS.read(body, "truncate_prompt_tokens")
    if tokens == 0:
        raise InvalidInput("truncate_prompt_tokens must be at least 1, or -1.", param="truncate_prompt_tokens")
    return tokens


def parse_prompt_kept(body: dict[str, Any]) -> dict[str, Any]:
    """What of a prompt stays, as fields of a generation request: its last tokens, unless ``truncation_side`` is the
    right one."""
    tokens, side = parse_kept(body), choice(body, "truncation_side", ("left", "right"))
    return {"keep_tokens": tokens, "keep_first": side == "right"}


def _truncate(body: dict[str, Any]) -> bool | None:
    value = body.get("truncate")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.upper() in ("NONE", "START", "END"):
        return value.upper() != "NONE"
    raise refuse("truncate", 'true, false, "NONE", "START" or "END"', value)


def _side(body: dict[str, Any]) -> Side:
    for name in ("truncation_side", "truncation_direction"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or value.lower() not in ("left", "right"):
            raise InvalidInput(f'{name} must be "left" or "right".', param=name)
        return "start" if value.lower() == "left" else "end"
    value = body.get("truncate")
    return "start" if isinstance(value, str) and value.upper() == "START" else "end"
