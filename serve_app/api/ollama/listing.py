"""Models as Ollama lists and shows them, from catalogue records."""

from __future__ import annotations

import hashlib
from typing import Any

# What runs here is never unloaded.
FOREVER = "2318-01-01T00:00:00Z"


def listed(model: str, *, created_at: str, weights: str, quantization: str, author: str) -> dict[str, Any]:
    """An item of `GET /api/tags`. The size of weights is not known here."""
    return {
        "name": model,
        "model": model,
        "modified_at": f"{created_at[:10]}T00:00:00Z",
        "size": 0,
        "digest": hashlib.sha256(weights.encode()).hexdigest(),
        "details": details(quantization, author),
    }


def details(quantization: str, author: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": author,
        "families": [author],
        "parameter_size": "",
        "quantization_level": quantization,
    }


def running(item: dict[str, Any], window: int | None) -> dict[str, Any]:
    """An item of `GET /api/ps`."""
    kept = {name: item[name] for name in ("name", "model", "size", "digest", "details")}
    return {**kept, "expires_at": FOREVER, "size_vram": 0, "context_length": window or 0}


def shown(
    item: dict[str, Any],
    *,
    template: str,
    license_: str,
    window: int | None,
    dimensions: int | None,
    capabilities: list[str],
) -> dict[str, Any]:
    """The answer to `POST /api/show`."""
    family = item["details"]["family"]
    about: dict[str, Any] = {"general.architecture": family, "general.basename": item["name"]}
    if window is not None:
        about[f"{family}.context_length"] = window
    if dimensions is not None:
        about[f"{family}.embedding_length"] = dimensions
    return {
        "modelfile": f"FROM {item['name']}\n",
        "parameters": "",
        "template": template,
        "license": license_,
        "details": item["details"],
        "model_info": about,
        "capabilities": capabilities,
        "modified_at": item["modified_at"],
    }
