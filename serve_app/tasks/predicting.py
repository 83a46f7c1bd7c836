"""Inputs through predictor replicas, for tasks whose models answer each of them by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput
from serve_app.api.types import Usage
from serve_app.tasks.work import Runtime, Work
from serve_app.wire.generate import Failed
from serve_app.wire.methods import PREDICT
from serve_app.wire.predict import PredictCall

# Tokens of one answer of an encoder-decoder model, whose decoders have no more places.
MAX_WRITTEN = 1024


def written_at_most(texts: list[str]) -> dict[str, int]:
    """The most units that writing a text for each of ``texts`` can take: no token is shorter than a byte."""
    return {"input_tokens": sum(len(text.encode()) + 8 for text in texts), "output_tokens": MAX_WRITTEN * len(texts)}


async def predict(
    runtime: Runtime, work: Work, inputs: list[bytes], options: Mapping[str, Any], *, tokens: int = 0
) -> list[Any]:
    """The worker's results for ``inputs``, in order; counts what it says it has used, and ``tokens`` that were read.
    Raises `InvalidInput` for what the model refuses.
    """
    work.placed = True
    call = PredictCall(tuple(inputs), orjson.dumps(dict(options)), work.caller.priority)
    result = await runtime.call_retried(work.model, PREDICT, call)
    if isinstance(result, Failed):
        raise InvalidInput(result.error)
    units = dict(result.units)
    # Those that the worker itself has read and written; tokens are usage.
    work.usage = Usage(units.pop("input_tokens", tokens), completion_tokens=units.pop("output_tokens", 0))
    work.units.update(units)
    return [orjson.loads(found) for found in result.results]
