"""Embeddings and reranking as the gateway sees them: texts to token ids, groups to replicas, rows back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from serve_app.api.errors import InputTooLong, InvalidInput, OutOfCapacity
from serve_app.api.multi_vector import Reading, lexical_weights
from serve_app.api.types import EmbedRequest, RerankRequest, TokenHead, Usage
from serve_app.catalog.pricing import neurons
from serve_app.gateway.backends.engine import MAX_ATTEMPTS, WorkerGone
from serve_app.gateway.models import ServedModel

# Sequences per call to a replica: small enough to spread one caller's thousands over replicas.
GROUP = 256
INLINE_CHARS = 20_000
# A vector of 1024 numbers per token: what is answered as JSON, and what only travels to the gateway.
MAX_VECTOR_TOKENS = 4096
MAX_SCORED_TOKENS = 32768


class EncoderClient:
    """``call(model, wire)`` encodes one group on a replica."""

    def __init__(self, call: Callable[[ServedModel, dict[str, Any]], Any], max_inflight: int) -> None:
        self._call = call
        self._max_inflight = max_inflight

    async def embed(self, model: ServedModel, request: EmbedRequest) -> tuple[Reading, Usage]:
        """What the model says of the texts, in their order."""
        tokenizer = model.tokenizer
        ids = await _maybe_in_thread(tokenizer.encode_batch, request.texts)
        if "colbert" in request.heads:
            limit = MAX_SCORED_TOKENS if request.form == "scores" else MAX_VECTOR_TOKENS
            if (total := sum(map(len, ids))) > limit:
                raise InputTooLong(f"A vector per token is limited to {limit} tokens in one request, got {total}.")
        options = {
            "pooling": request.pooling or model.record.pooling,
            "normalize": model.record.normalize,
            "dimensions": request.dimensions,
            "heads": list(request.heads),
        }
        with model.place(self._max_inflight, reject_if_busy=request.reject_if_busy):
            results = await self._encode(model, ids, None, options)
        if not request.heads:
            return Reading(_rows(results)), _usage(model, ids)
        return _reading(results, ids, request.heads, tokenizer.special_ids), _usage(model, ids)

    async def rerank(self, model: ServedModel, request: RerankRequest) -> tuple[np.ndarray, Usage]:
        """Scores [n] in the order of the contexts, within (0, 1)."""
        pairs = [(request.query, context) for context in request.contexts]
        encoded = await _maybe_in_thread(model.tokenizer.encode_pairs, pairs)
        ids, types = [e[0] for e in encoded], [e[1] for e in encoded]
        with model.place(self._max_inflight, reject_if_busy=request.reject_if_busy):
            scores = _rows(await self._encode(model, ids, types, {}))
        return scores, _usage(model, ids)

    async def _encode(
        self, model: ServedModel, ids: list[np.ndarray], types: list[np.ndarray] | None, options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """The workers' answers, group by group."""
        limit = model.record.properties.max_input_tokens
        for index, sequence in enumerate(ids):
            if limit is not None and len(sequence) > limit:
                raise InputTooLong(
                    f"Input {index} has {len(sequence)} tokens; {model.id} takes at most {limit}. Split it into parts."
                )
        starts = range(0, len(ids), GROUP)
        calls = [
            self._group(model, ids[i : i + GROUP], types[i : i + GROUP] if types is not None else None, options)
            for i in starts
        ]
        return await asyncio.gather(*calls)

    async def _group(
        self, model: ServedModel, ids: list[np.ndarray], types: list[np.ndarray] | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        wire = {
            "ids": np.concatenate(ids).astype(np.int32).tobytes(),
            "lengths": np.array([len(s) for s in ids], np.int32).tobytes(),
            **options,
        }
        if types is not None:
            wire["types"] = np.concatenate(types).astype(np.int32).tobytes()
        result = await self._retried(model, wire)
        if "error" in result:
            raise InvalidInput(f"The model refuses this input: {result['error']}.")
        return result

    async def _retried(self, model: ServedModel, wire: dict[str, Any]) -> dict[str, Any]:
        """Encoding twice does no harm, so a lost worker costs time and nothing else."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self._call(model, wire)
            except WorkerGone:
                await asyncio.sleep(0.2 * attempt)
        raise OutOfCapacity("The workers of this model were lost repeatedly; please try again.", retry_after=5.0)


def _rows(results: list[dict[str, Any]]) -> np.ndarray:
    """Rows of one length, [n, d] or [n]."""
    found = [np.frombuffer(r["data"], np.float32).reshape(r["shape"]) for r in results]
    return np.concatenate(found) if found else np.zeros((0, 0), np.float32)


def _reading(
    results: list[dict[str, Any]], ids: list[np.ndarray], heads: tuple[TokenHead, ...], ignored: Collection[int]
) -> Reading:
    """Rows that go on behind a vector: with a weight per token, and a vector per token but the first."""
    rows: list[np.ndarray] = []
    for result in results:
        sizes = np.frombuffer(result["sizes"], np.int32)
        rows += np.split(np.frombuffer(result["data"], np.float32), np.cumsum(sizes)[:-1])
    width = results[0]["width"]
    reading = Reading(np.stack([row[:width] for row in rows]))
    rest = [row[width:] for row in rows]
    if "sparse" in heads:
        pairs = zip(ids, rest, strict=True)
        reading.lexical = [lexical_weights(tokens, row[: len(tokens)], ignored) for tokens, row in pairs]
        rest = [row[len(tokens) :] for tokens, row in zip(ids, rest, strict=True)]
    if "colbert" in heads:
        reading.colbert = [row.reshape(max(len(tokens) - 1, 1), -1) for tokens, row in zip(ids, rest, strict=True)]
    return reading


def _usage(model: ServedModel, ids: list[np.ndarray]) -> Usage:
    tokens = sum(len(s) for s in ids)
    return Usage(tokens, 0, 0, neurons(model.record.price, tokens, 0, 0))


async def _maybe_in_thread(encode: Callable[[Any], Any], texts: list[Any]) -> Any:
    size = sum(len(t) if isinstance(t, str) else len(t[0]) + len(t[1]) for t in texts)
    return await asyncio.to_thread(encode, texts) if size > INLINE_CHARS else encode(texts)
