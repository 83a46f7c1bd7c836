"""The catalogue as Cloudflare's models/search shows it. Values are strings, only `price` is an array of
objects.
"""

from __future__ import annotations

import uuid
from typing import Any

from serve_app.catalog.pricing import price_property
from serve_app.catalog.records import ModelRecord

# Ids and names are Cloudflare's, so that clients which know them keep working. Rerankers are filed under
# classification.
TASKS: dict[str, dict[str, str]] = {
    "text-generation": {
        "id": "c329a1f9-323d-4e91-b2aa-582dd4188d34",
        "name": "Text Generation",
        "description": "Models that write text: chat, completion, tool calls.",
    },
    "text-embeddings": {
        "id": "0137cdcf-162a-4108-94f2-1ca59e8c65ee",
        "name": "Text Embeddings",
        "description": "Models that turn text into vectors.",
    },
    "reranking": {
        "id": "19606750-23ed-4371-aab2-c20349b53a60",
        "name": "Text Classification",
        "description": "Models that score or sort text, rerankers among them.",
    },
}


def search_record(record: ModelRecord) -> dict[str, Any]:
    """One element of `result` in models/search."""
    has_output = record.task == "text-generation"
    properties: list[dict[str, Any]] = [
        {"property_id": key, "value": _as_text(value)}
        for key, value in record.properties.model_dump(exclude_none=True).items()
    ]
    if record.price is not None:
        properties.append({"property_id": "price", "value": price_property(record.price, has_output)})
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"serve-app:{record.id}")),
        "source": 1,
        "name": record.id,
        "description": record.description,
        "task": TASKS[record.task],
        "created_at": record.created_at if " " in record.created_at else f"{record.created_at} 00:00:00.000",
        "tags": list(record.tags),
        "properties": properties,
    }


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
