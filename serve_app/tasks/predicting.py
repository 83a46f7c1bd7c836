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
    work.usage = Usage(prompt_tokens=tokens)
    work.units.update(result.units)
    return [orjson.loads(found) for found in result.results]
