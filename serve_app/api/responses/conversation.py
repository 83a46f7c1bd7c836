"""Conversations of the Responses dialect: their bodies, and items as they are stored and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.api import identity
from serve_app.api.errors import InvalidInput, NotFound
from serve_app.api.fields.asked import parse_metadata
from serve_app.api.fields.content import TEXT_ONLY, PartKind
from serve_app.api.fields.ranges import Range
from serve_app.api.fields.values import choice, refuse
from serve_app.api.responses.read import parse_input

PAGE = Range(1, 100)
PAGE_ITEMS = 20
# What ids of items begin with, by their kind.
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def parse_create(
    body: dict[str, Any], takes: frozenset[PartKind] = TEXT_ONLY
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Metadata and first items of a new conversation, from the body of `POST /v1/conversations`."""
    items = body.get("items")
    return parse_metadata(body.get("metadata")), [] if items in (None, []) else stored_items(items, "items", takes)


def parse_update(body: dict[str, Any]) -> dict[str, str]:
    if body.get("metadata") is None:
        raise InvalidInput("metadata is missing; send an object of strings.", param="metadata")
    return parse_metadata(body["metadata"])


def parse_items(body: dict[str, Any], takes: frozenset[PartKind] = TEXT_ONLY) -> list[dict[str, Any]]:
    if body.get("items") is None:
        raise InvalidInput("items is missing; send an array of items.", param="items")
    return stored_items(body["items"], "items", takes)


def stored_items(value: Any, name: str, takes: frozenset[PartKind] = TEXT_ONLY) -> list[dict[str, Any]]:
    """Items that a client sent in the field ``name`` as conversations hold them: checked, in full, and with ids of our
    own. Raises `InvalidInput`.
    """
    if name == "items" and not isinstance(value, list):
        raise refuse(name, "an array of items", value)
    try:
        parse_input(value, takes)
    except InvalidInput as error:
        if name == "input":
            raise
        message = error.message.replace("input", name, 1)
        raise InvalidInput(message, param=(error.param or name).replace("input", name, 1)) from None
    listed = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [_stored(item, place) for place, item in enumerate(listed)]


def _stored(item: dict[str, Any], place: int) -> dict[str, Any]:
    kind = item.get("type", "message")
    head = {"id": f"{_PREFIXES.get(kind, 'item')}_{identity.part_id('item', place)}", "type": kind}
    if kind != "message":
        kept = {name: value for name, value in item.items() if name not in ("id", "type", "status")}
        return {**head, "status": "completed", **kept}
    role = item["role"]
    said = item.get("content")
    parts = [{"text": said}] if isinstance(said, str) else said or []
    return {**head, "status": "completed", "role": role, "content": [_part(part, role) for part in parts]}


def _part(part: dict[str, Any], role: str) -> dict[str, Any]:
    if part.get("type", "text") not in ("text", "input_text", "output_text"):
        return part
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part["text"]}


def parse_page(query: Mapping[str, str]) -> tuple[str | None, int, bool]:
    """The item behind which a page begins, its length, and whether the newest come first."""
    asked: dict[str, Any] = dict(query)
    limit = asked.get("limit")
    if limit is not None:
        asked["limit"] = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else limit
    length = PAGE.read(asked, "limit") or PAGE_ITEMS
    return asked.get("after") or None, length, choice(asked, "order", ("asc", "desc")) != "asc"


def render_page(items: list[dict[str, Any]], has_more: bool = False) -> dict[str, Any]:
    """A list of items, as clients page through it."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, "has_more": has_more, **ends}


def page_of(items: list[dict[str, Any]], after: str | None, limit: int, descending: bool) -> dict[str, Any]:
    """One page of ``items``, which are all there are. Raises `NotFound`."""
    listed = items[::-1] if descending else items
    if after is not None:
        place = next((i for i, item in enumerate(listed) if item["id"] == after), None)
        if place is None:
            raise NotFound(f"after names no item of this list: {after[:80]}.", param="after")
        listed = listed[place + 1 :]
    return render_page(listed[:limit], len(listed) > limit)


def render_conversation(conversation_id: str, created: float, metadata: dict[str, str]) -> dict[str, Any]:
    return {"id": conversation_id, "object": "conversation", "created_at": int(created), "metadata": metadata}
