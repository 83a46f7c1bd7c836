"""Text embeddings: texts to token ids, through encoder replicas, and back as what the model says of each text."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np

from serve_app.api.errors import InputTooLong, InvalidInput
from serve_app.api.multi_vector import Reading, lexical_weights
from serve_app.api.types import EmbedRequest, Shorten, TokenHead, Usage
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.encoding import encode, fitting, rows, tokenise, within
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime
from serve_app.text.embed_prompts import prompt_for
from serve_app.wire.encode import EncodeCall, Encoded, EncodedTokens

# A vector of 1024 numbers per token: what is answered as JSON, and what only travels to the gateway.
MAX_VECTOR_TOKENS = 4096
MAX_SCORED_TOKENS = 32768


async def embed(runtime: Runtime, model: ServedModel, request: EmbedRequest, caller: Caller) -> tuple[Reading, Usage]:
    """What the model says of the texts, in their order."""
    dimensions = _dimensions(model, request)
    ids = await token_ids(model, request)
    asked = EncodeCall(
        pooling=request.pooling or model.record.pooling,
        normalize=model.record.normalize,
        dimensions=dimensions,
        heads=request.heads,
    )
    total = sum(map(len, ids))
    busy, facts = request.reject_if_busy, {"prompt_tokens": total, "texts": len(ids)}
    worst = {"input_tokens": total}
    async with runtime.work(model, caller, reject_if_busy=busy, facts=facts, worst=worst) as work:
        results = await encode(runtime, work, ids, None, asked)
        if not request.heads:
            reading = Reading(rows(results))
        else:
            reading = _reading(results, ids, request.heads, model.tokenizer.special_ids)
    return reading, work.usage


async def token_ids(model: ServedModel, request: EmbedRequest) -> list[np.ndarray]:
    """The texts as the model reads them. Raises `InvalidInput` and `InputTooLong`."""
    tokenizer = model.tokenizer
    shorten = fitting(model, request.shorten)
    if request.ids is not None:
        _check_vocabulary(request.ids, model)
        ids = within(model, [_cut(row, shorten) for row in request.ids])
    else:
        texts = prompted(tokenizer.folder, request)
        ids = await tokenise(model, partial(tokenizer.encode_batch, shorten=shorten), texts, shorten)
    if "colbert" in request.heads:
        total, limit = sum(map(len, ids)), MAX_SCORED_TOKENS if request.form == "scores" else MAX_VECTOR_TOKENS
        if total > limit:
            raise InputTooLong(f"A vector per token is limited to {limit} tokens in one request, got {total}.")
    return ids


def prompted(folder: Path, request: EmbedRequest) -> list[str]:
    """The texts with what the model in ``folder`` wants before them."""
    if request.form == "scores":
        first = prompt_for(folder, "query", request.instruction) + request.texts[0]
        return [first, *(prompt_for(folder, "document") + text for text in request.texts[1:])]
    prompt = prompt_for(folder, request.role, request.instruction)
    return [prompt + text for text in request.texts] if prompt else request.texts


def _dimensions(model: ServedModel, request: EmbedRequest) -> int | None:
    """How many values of a vector are wanted. Raises `InvalidInput` where a part of the vector is no vector."""
    whole = model.record.properties.output_dimensions
    if request.dimensions in (None, whole) or model.record.matryoshka:
        return request.dimensions
    raise InvalidInput(
        f"dimensions: {model.id} was not trained so that parts of its vectors could stand alone; leave the field out.",
        param="dimensions",
    )


def _check_vocabulary(rows: list[tuple[int, ...]], model: ServedModel) -> None:
    size = model.tokenizer.vocab_size
    if max(map(max, rows)) >= size:
        # LangChain's client tokenises for OpenAI's models unless told not to.
        raise InvalidInput(
            f"input holds token ids that {model.id} does not have; its own go from 0 to {size - 1} (POST /tokenize). "
            "Clients that tokenise for OpenAI's models must send text.",
            param="input",
        )


def _cut(row: tuple[int, ...], shorten: Shorten | None) -> np.ndarray:
    """Token ids of a client as they are, or cut."""
    ids = np.array(row, np.int32)
    if shorten is None or shorten.tokens is None or len(ids) <= shorten.tokens:
        return ids
    return ids[-shorten.tokens :] if shorten.side == "start" else ids[: shorten.tokens]


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
