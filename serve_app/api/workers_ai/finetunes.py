"""Fine-tunes as Cloudflare's clients send and read them; more is told than they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import boolean, string

MAX_PAGE = 1000
MAX_DESCRIPTION = 1000
_ORDERS = {"created_at": "created", "modified_at": "modified", "name": "name"}


@dataclass(slots=True, frozen=True)
class NewFinetune:
    model: str
    name: str
    description: str = ""
    public: bool = False


def parse_finetune(body: dict[str, Any]) -> NewFinetune:
    """`POST /ai/finetunes`. Raises `InvalidInput`."""
    model, name = string(body, "model", limit=512), string(body, "name", limit=512)
    if not model:
        raise InvalidInput("model is missing; name the base model, as GET /ai/models/search lists it.", param="model")
    if not name:
        raise InvalidInput("name is missing; it is what requests call the fine-tune by.", param="name")
    described = string(body, "description", limit=MAX_DESCRIPTION) or ""
    return NewFinetune(model, name, described, bool(boolean(body, "public")))


def parse_changes(body: dict[str, Any]) -> tuple[str | None, bool | None]:
    """`PATCH /ai/finetunes/{id}`: the description and whether it is public, where they change."""
    if unknown := [name for name in body if name not in ("description", "public")]:
        raise InvalidInput(
            f"{unknown[0][:64]} does not change; description and public do. New files are a new version: POST "
            ".../versions.",
            param=unknown[0][:64],
        )
    return string(body, "description", limit=MAX_DESCRIPTION), boolean(body, "public")


def parse_page(query: Mapping[str, str]) -> tuple[int, int, Any]:
    """``limit``, ``offset`` and the order of `GET /ai/finetunes/public`."""
    order = query.get("orderBy") or "created_at"
    if order not in _ORDERS:
        raise InvalidInput(f"orderBy is one of {', '.join(_ORDERS)}.", param="orderBy")
    return _number(query, "limit", 100, MAX_PAGE), _number(query, "offset", 0, 10**9), _ORDERS[order]


def _number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    value = query.get(name, "").strip()
    if not value:
        return default
    # Cloudflare's clients send a float.
    whole = value.removesuffix(".0")
    if not (whole.isascii() and whole.isdigit() and len(whole) <= 9):
        raise InvalidInput(f"{name} is a number from 0 on.", param=name)
    return min(int(whole), most)


def when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def render_finetune(
    *,
    id: str,
    model: str,
    name: str,
    description: str,
    public: bool,
    created: float,
    modified: float,
    **more: Any,
) -> dict[str, Any]:
    """What Cloudflare tells of a fine-tune, and ``more``."""
    return {
        "id": id,
        "model": model,
        "name": name,
        "description": description,
        "public": public,
        "created_at": when(created),
        "modified_at": when(modified),
        **more,
    }
