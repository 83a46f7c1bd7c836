"""The catalogue as Cloudflare's models/search shows it. Values are strings, only `price` is an array of
objects.
"""

from __future__ import annotations

import uuid
from typing import Any

from serve_app.catalog.pricing import price_property
from serve_app.catalog.records import ModelRecord


def search_record(record: ModelRecord) -> dict[str, Any]:
    """One element of `result` in models/search."""
    properties: list[dict[str, Any]] = [
        {"property_id": key, "value": _as_text(value)}
        for key, value in record.properties.model_dump(exclude_none=True).items()
    ]
    if interface := record.task_declaration.interface:
        properties.append({"property_id": "interface", "value": interface})
    if record.adapters is not None:
        properties.append({"property_id": "lora", "value": "true"})
    if record.price is not None:
        properties.append(
            {"property_id": "price", "value": price_property(record.price, record.task_declaration.units)}
        )
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"serve-app:{record.id}")),
        "source": 1,
        "name": record.id,
        "description": record.description,
        "task": record.task_declaration.listed,
        "created_at": record.created_at if " " in record.created_at else f"{record.created_at} 00:00:00.000",
        "tags": list(record.tags),
        "properties": properties,
    }


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
