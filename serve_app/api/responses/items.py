"""A response's usage, and ids of its items.

Each id names the response and the item's place there, so that a reference needs no index.

resp_0123...  ->  msg_0123...0000, fc_0123...0001
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.api.errors import ApiError, InvalidInput
from serve_app.api.fields.content import MEDIA, Content, content_text, text_part
from serve_app.api.fields.pictures import data_url
from serve_app.api.receipt import receipt
from serve_app.api.types import Usage

MAX_REFERRED = 64
_ITEM_ID = re.compile(r"(?:msg|fc|rs)_([0-9a-f]{32})([0-9a-f]{4})", re.ASCII)

Fetch = Callable[[str], Awaitable[dict[str, Any]]]


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
        **receipt(usage),
    }


def input_parts(content: Content) -> list[dict[str, Any]]:
    """What somebody has said, as this dialect shows it: text between files is one part."""
    parts: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for part in [text_part(content)] if isinstance(content, str) else content:
        if part["type"] not in MEDIA:
            said.append(part)
            continue
        parts += [_input_text(said)] if said else []
        parts.append(_input_file(part))
        said = []
    return [*parts, _input_text(said)] if said or not parts else parts


def _input_file(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "input_image", "image_url": data_url(part), "detail": "auto"}
    return {"type": "input_audio", "input_audio": part["source"]}


def _input_text(said: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "input_text", "text": content_text(said)}


def item_id(kind: str, response_id: str, index: int) -> str:
    return f"{kind}_{response_id.removeprefix('resp_')}{index:04x}"


async def resolve_references(body: dict[str, Any], fetch: Fetch) -> dict[str, Any]:
    """``body`` with the items that `item_reference` items of its input name in their places.

    ``fetch`` gives a stored response by its id. Raises `InvalidInput` for a reference to what is not stored.
    """
    listed = body.get("input")
    if not isinstance(listed, list) or not any(_is_reference(item) for item in listed):
        return body
    stored: dict[str, dict[str, Any]] = {}
    out = []
    for i, item in enumerate(listed):
        out.append(await _item(item.get("id"), f"input[{i}]", stored, fetch) if _is_reference(item) else item)
    return {**body, "input": out}


def _is_reference(item: Any) -> bool:
    """The type may be left out where there is nothing but an id."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


async def _item(named: Any, where: str, stored: dict[str, dict[str, Any]], fetch: Fetch) -> dict[str, Any]:
    found = _ITEM_ID.fullmatch(named) if isinstance(named, str) else None
    if found is None:
        raise InvalidInput(f"{where}.id must be the id of an item of a response.", param=f"{where}.id")
    response_id = f"resp_{found[1]}"
    if response_id not in stored:
        if len(stored) >= MAX_REFERRED:
            message = f"input refers to more than {MAX_REFERRED} responses; send their items, or previous_response_id."
            raise InvalidInput(message, param="input")
        try:
            stored[response_id] = await fetch(response_id)
        except ApiError:
            raise _gone(named, where) from None
    output, index = stored[response_id]["output"], int(found[2], 16)
    if index >= len(output) or output[index]["id"] != named:
        raise _gone(named, where)
    return output[index]


def _gone(named: str, where: str) -> InvalidInput:
    return InvalidInput(
        f"{where}: item {named} is not here (deleted, expired, or never stored). Send the item itself.", param=where
    )
