"""Text embeddings: texts to token ids, through encoder replicas, and back as what the model says of each text."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from serve_app.api.errors import InputTooLong
from serve_app.api.multi_vector import Reading, lexical_weights
from serve_app.api.types import EmbedRequest, TokenHead, Usage
from serve_app.state.accounts import Caller
from serve_app.tasks.encoding import encode, rows, tokenise
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime
from serve_app.wire.encode import EncodeCall, Encoded, EncodedTokens

# A vector of 1024 numbers per token: what is answered as JSON, and what only travels to the gateway.
MAX_VECTOR_TOKENS = 4096
MAX_SCORED_TOKENS = 32768


async def embed(runtime: Runtime, model: ServedModel, request: EmbedRequest, caller: Caller) -> tuple[Reading, Usage]:
    """What the model says of the texts, in their order."""
    tokenizer = model.tokenizer
    ids = await tokenise(model, tokenizer.encode_batch, request.texts)
    total = sum(map(len, ids))
    if "colbert" in request.heads:
        limit = MAX_SCORED_TOKENS if request.form == "scores" else MAX_VECTOR_TOKENS
        if total > limit:
            raise InputTooLong(f"A vector per token is limited to {limit} tokens in one request, got {total}.")
    asked = EncodeCall(
        pooling=request.pooling or model.record.pooling,
        normalize=model.record.normalize,
        dimensions=request.dimensions,
        heads=request.heads,
    )
    busy, facts = request.reject_if_busy, {"prompt_tokens": total, "texts": len(ids)}
    with runtime.work(model, caller, reject_if_busy=busy, facts=facts) as work:
        results = await encode(runtime, work, ids, None, asked)
        if not request.heads:
            reading = Reading(rows(results))
        else:
            reading = _reading(results, ids, request.heads, tokenizer.special_ids)
    return reading, work.usage


def _reading(
    results: list[Encoded | EncodedTokens],
    ids: list[np.ndarray],
    heads: tuple[TokenHead, ...],
    ignored: Collection[int],
) -> Reading:
    """Rows that go on behind a vector: with a weight per token, and a vector per token but the first."""
    rows: list[np.ndarray] = []
    width = 0
    for result in results:
        assert isinstance(result, EncodedTokens)
        sizes = np.frombuffer(result.sizes, np.int32)
        rows += np.split(np.frombuffer(result.data, np.float32), np.cumsum(sizes)[:-1])
        width = result.width
    reading = Reading(np.stack([row[:width] for row in rows]))
    rest = [row[width:] for row in rows]
    if "sparse" in heads:
        pairs = zip(ids, rest, strict=True)
        reading.lexical = [lexical_weights(tokens, row[: len(tokens)], ignored) for tokens, row in pairs]
        rest = [row[len(tokens) :] for tokens, row in zip(ids, rest, strict=True)]
    if "colbert" in heads:
        reading.colbert = [row.reshape(max(len(tokens) - 1, 1), -1) for tokens, row in zip(ids, rest, strict=True)]
    return reading
