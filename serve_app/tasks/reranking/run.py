"""Reranking: pairs of the query and a context through encoder replicas, and back as scores."""

from __future__ import annotations

from functools import partial

import numpy as np

from serve_app.api.types import RerankRequest, Usage
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.encoding import encode, fitting, rows, tokenise
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime
from serve_app.text.rerank_prompt import answers_pairs, encode_questions
from serve_app.wire.encode import EncodeCall


async def rerank(
    runtime: Runtime, model: ServedModel, request: RerankRequest, caller: Caller
) -> tuple[np.ndarray, Usage]:
    """Scores [n] in the order of the contexts, within (0, 1) unless they are to be raw."""
    encoded = await pairs(model, request)
    ids, types = [e[0] for e in encoded], [e[1] for e in encoded]
    busy, facts = request.reject_if_busy, {"prompt_tokens": sum(map(len, ids)), "contexts": len(ids)}
    worst = {"input_tokens": sum(map(len, ids))}
    async with runtime.work(model, caller, reject_if_busy=busy, facts=facts, worst=worst) as work:
        scores = rows(await encode(runtime, work, ids, types, EncodeCall(raw=request.raw)))
    return scores, work.usage


async def pairs(model: ServedModel, request: RerankRequest) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids and types of each pair, as the model reads them. Raises `InputTooLong`."""
    shorten = fitting(model, request.shorten)
    asks = answers_pairs(model.tokenizer.folder)
    read = (
        partial(encode_questions, tokenizer=model.tokenizer, shorten=shorten)
        if asks
        else partial(model.tokenizer.encode_pairs, shorten=shorten)
    )
    return await tokenise(model, read, request.pairs, shorten)
