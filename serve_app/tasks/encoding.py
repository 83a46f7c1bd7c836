"""Token sequences through encoder replicas, for tasks that read texts: groups of them at once, rows back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from serve_app.api.errors import InputTooLong, InvalidInput
from serve_app.api.types import Usage
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime, Work
from serve_app.wire.encode import EncodeCall, Encoded, EncodedTokens
from serve_app.wire.generate import Failed
from serve_app.wire.methods import ENCODE

# Sequences per call to a replica: small enough to spread one caller's thousands over replicas.
GROUP = 256
INLINE_CHARS = 20_000


async def tokenise(encode: Callable[[Any], Any], texts: list[Any]) -> Any:
    """``encode(texts)``, of texts or pairs of texts, off the event loop where they are many."""
    size = sum(len(t) if isinstance(t, str) else len(t[0]) + len(t[1]) for t in texts)
    return await asyncio.to_thread(encode, texts) if size > INLINE_CHARS else encode(texts)


async def encode(
    runtime: Runtime, work: Work, ids: list[np.ndarray], types: list[np.ndarray] | None, asked: EncodeCall
) -> list[Encoded | EncodedTokens]:
    """The workers' answers for sequences ``ids`` (int32) with token ``types``, group by group; counts the tokens.
    ``asked`` says what for.
    """
    limit = work.model.record.properties.max_input_tokens
    for index, sequence in enumerate(ids):
        if limit is not None and len(sequence) > limit:
            raise InputTooLong(
                f"Input {index} has {len(sequence)} tokens; {work.model.id} takes at most {limit}. Split it into parts."
            )
    work.placed = True
    starts = range(0, len(ids), GROUP)
    calls = [
        _group(runtime, work.model, ids[i : i + GROUP], types[i : i + GROUP] if types is not None else None, asked)
        for i in starts
    ]
    results = await asyncio.gather(*calls)
    work.usage = Usage(prompt_tokens=sum(len(s) for s in ids))
    return results


async def _group(
    runtime: Runtime,
    model: ServedModel,
    ids: list[np.ndarray],
    types: list[np.ndarray] | None,
    asked: EncodeCall,
) -> Encoded | EncodedTokens:
    call = replace(
        asked,
        ids=np.concatenate(ids).astype(np.int32).tobytes(),
        lengths=np.array([len(s) for s in ids], np.int32).tobytes(),
        types=None if types is None else np.concatenate(types).astype(np.int32).tobytes(),
    )
    result = await runtime.call_retried(model, ENCODE, call)
    if isinstance(result, Failed):
        raise InvalidInput(f"The model refuses this input: {result.error}.")
    return result


def rows(results: list[Encoded | EncodedTokens]) -> np.ndarray:
    """Rows of one length, [n, d] or [n]."""
    found = [np.frombuffer(r.data, np.float32).reshape(r.shape) for r in results if isinstance(r, Encoded)]
    return np.concatenate(found) if found else np.zeros((0, 0), np.float32)
