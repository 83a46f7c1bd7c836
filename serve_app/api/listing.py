"""The model list in its three shapes: Cloudflare's `models/search`, OpenAI's `models`, OpenRouter's.

Works on catalogue records as `models/search` shows them:
``{id, source, name, description, task: {id, name, description}, created_at, tags, properties: [{property_id,
value}]}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput, NotFound

Record = Mapping[str, Any]
PER_PAGE = 100
MAX_PER_PAGE = 1000
CHAT = "chat"  # the interface of models that chat


def search(records: Sequence[Record], query: Mapping[str, str]) -> dict[str, Any]:
    """The answer to `GET /ai/models/search` with the query's filters and paging.

    Clients page until a page is empty, so a page beyond the end is an empty result and no error. Raises
    `InvalidInput` for a page that is no positive integer and for an unknown format.
    """
    found = [record for record in records if _matches(record, query)]
    form = query.get("format")
    if form == "openrouter":
        return {"data": [_openrouter(record) for record in found]}
    if form:
        raise InvalidInput('format must be "openrouter" or left out.', param="format")
    return paged([dict(record) for record in found], query)


def search_authors(records: Sequence[Record], query: Mapping[str, str]) -> dict[str, Any]:
    """The answer to `GET /ai/authors/search`: who made the models, by name; ``search`` filters."""
    names = sorted({_author(record) for record in records})
    return paged([{"id": name, "name": name} for name in names if _names(name, query)], query)


def search_tasks(records: Sequence[Record], query: Mapping[str, str]) -> dict[str, Any]:
    """The answer to `GET /ai/tasks/search`: ``{id, name, description}`` of every task that some model does."""
    tasks = {record["task"]["id"]: record["task"] for record in records}
    found = sorted(tasks.values(), key=lambda task: task["name"])
    return paged([dict(task) for task in found if _names(task["name"], query)], query)


def _names(name: str, query: Mapping[str, str]) -> bool:
    return all(word in name.lower() for word in query.get("search", "").lower().split())


def paged(found: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The envelope around the page of ``found`` that ``query`` asks for by ``page`` and ``per_page``."""
    page = _positive(query, "page", 1, 10**9)
    per_page = _positive(query, "per_page", PER_PAGE, MAX_PER_PAGE)
    shown = found[(page - 1) * per_page : page * per_page]
    info = {"page": page, "per_page": per_page, "count": len(shown), "total_count": len(found)}
    return success(shown, result_info=info)


def _matches(record: Record, query: Mapping[str, str]) -> bool:
    author = query.get("author", "").strip().lower()
    if author and _author(record).lower() != author:
        return False
    task = query.get("task", "").strip().lower()
    if task and task not in (record["task"]["name"].lower(), record["task"]["id"].lower()):
        return False
    if query.get("source") and str(record["source"]) != query["source"].strip():
        return False
    if _flag(query, "hide_experimental") and property_value(record, "beta") == "true":
        return False
    date = property_value(record, "planned_deprecation_date")
    if date and not _flag(query, "include_deprecated") and str(date)[:10] < datetime.now(UTC).date().isoformat():
        return False
    words = query.get("search", "").lower().split()
    text = f"{record['name']} {record['description']} {record['task']['name']}".lower()
    return all(word in text for word in words)


def property_value(record: Record, property_id: str) -> Any:
    """The value of a record's property, or None."""
    found = (item["value"] for item in record["properties"] if item["property_id"] == property_id)
    return next(found, None)


def _author(record: Record) -> str:
    parts = record["name"].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "").strip().lower()
    if value not in ("", "true", "false", "1", "0"):
        raise InvalidInput(f"{name} must be true or false.", param=name)
    return value in ("true", "1")


def _positive(query: Mapping[str, str], name: str, default: int, high: int) -> int:
    value = query.get(name, "").strip()
    if not value:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) > 0):
        raise InvalidInput(f"{name} must be a positive integer.", param=name)
    return min(int(value), high)


def _created(record: Record) -> int:
    try:
        return int(datetime.fromisoformat(record["created_at"]).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return 0


def _openrouter(record: Record) -> dict[str, Any]:
    """OpenRouter's listing: prices as strings in dollars per token."""
    prices = {item["unit"]: item["price"] for item in property_value(record, "price") or ()}
    window = property_value(record, "context_window")

    def per_token(unit: str) -> str:
        return f"{float(prices.get(unit, 0)) / 1e6:.12f}".rstrip("0").rstrip(".")

    return {
        "id": record["name"],
        "name": record["name"].rsplit("/", 1)[-1],
        "created": _created(record),
        "description": record["description"],
        "context_length": int(window) if window else None,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "pricing": {
            "prompt": per_token("per M input tokens"),
            "completion": per_token("per M output tokens"),
            "input_cache_read": per_token("per M cached input tokens"),
        },
    }


def openai_models(records: Iterable[Record]) -> dict[str, Any]:
    """The answer to `GET /v1/models`, for OpenAI's clients and (``has_more`` and the like) Anthropic's."""
    # Those that chat come first: clients that ask nobody take the first one.
    chats_first = sorted(records, key=lambda record: property_value(record, "interface") != CHAT)
    data = [_openai(record) for record in chats_first]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": False, **ends}


def openai_model(records: Iterable[Record], name: str) -> dict[str, Any]:
    """The answer to `GET /v1/models/{model}`; raises `NotFound`."""
    for record in records:
        if record["name"] == name:
            return _openai(record)
    raise NotFound(f"No such model {name[:120]}. GET /v1/models lists the models.", param="model")


def _window(record: Record) -> int | None:
    """Tokens of a prompt with its answer, or of a text."""
    window = property_value(record, "context_window") or property_value(record, "max_input_tokens")
    return int(window) if window else None


def _openai(record: Record) -> dict[str, Any]:
    created = _created(record)
    return {
        "id": record["name"],
        "object": "model",
        "created": created,
        "owned_by": _author(record),
        # As vLLM's clients look for it.
        "max_model_len": _window(record),
        # The same in Anthropic's words.
        "type": "model",
        "display_name": record["name"].rsplit("/", 1)[-1],
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
    }
