"""Inputs through predictor replicas, for tasks whose models answer each of them by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput, OutOfCapacity
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
    """The worker's results for ``inputs``, in order; adds what it says it has used, and ``tokens`` that were read.
    Raises `InvalidInput` for what the model refuses, and `OutOfCapacity` where too much of the caller's waits already.
    """
    work.placed = True
    call = PredictCall(tuple(inputs), orjson.dumps(dict(options)), work.caller.priority, work.salt)
    result = await runtime.call_retried(work.model, PREDICT, call)
    if isinstance(result, Failed):
        raise InvalidInput(result.error) if result.refused else OutOfCapacity(result.error)
    units, usage = dict(result.units), work.usage
    # Those that the worker itself has read and written; tokens are usage.
    read, written = units.pop("input_tokens", tokens), units.pop("output_tokens", 0)
    work.usage = Usage(usage.prompt_tokens + read, completion_tokens=usage.completion_tokens + written)
    for name, count in units.items():
        work.units[name] = work.units.get(name, 0) + count
    return [orjson.loads(found) for found in result.results]
