"""Models of transformers by their automatic classes, from a folder alone."""

from __future__ import annotations

from typing import Any

import torch

from serve_app.predict.predictor import Place


def load_model(automatic: Any, place: Place) -> Any:
    """``automatic.from_pretrained`` of the place's folder: nothing is fetched, and no code of the folder is run."""
    dtype = "auto" if place.dtype == "auto" else getattr(torch, place.dtype)
    model = automatic.from_pretrained(
        place.path, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    return model.to(place.device).eval()


def labels(model: Any) -> list[str]:
    """The names of a classifier's classes, in the order of its outputs."""
    named: dict[int, str] = model.config.id2label
    return [named[i] for i in range(len(named))]
