"""The native answer of text embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from serve_app.api.envelopes import success
from serve_app.api.multi_vector import Reading, scores
from serve_app.api.types import EmbedRequest, Usage
from serve_app.api.workers_ai.write import input_usage, ranked


def render_embed(
    request: EmbedRequest, reading: Reading, usage: Usage, *, pooling: str | None = "mean"
) -> dict[str, Any]:
    """Vectors, and what else was asked for; the form ``scores`` gives the contexts' scores, best first. ``pooling`` is
    the model's where the request names none."""
    counted = input_usage(usage)
    if request.form == "scores":
        found = scores(reading, request.score_mode, request.score_weights)
        return success({"response": ranked(found, None), "usage": counted})
    answer: dict[str, Any] = {}
    if request.return_dense:
        key = "response" if request.form == "contexts" else "data"
        dense = np.asarray(reading.dense, dtype=np.float32)
        answer = {"shape": list(dense.shape), key: dense.tolist()}
        if (named := request.pooling or pooling) in ("mean", "cls"):
            answer["pooling"] = named
    return success({**answer, **reading.json(), "usage": counted})
