"""Grammars of requests, made and checked beside the event loop: a hostile one holds up nobody but its sender."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import GenerateRequest
from serve_app.grammar.answer import answer_grammar, needs_grammar, token_rule
from serve_app.tasks.model import ServedModel
from serve_app.text.reasoning import MARKS, TAIL_CHARS, opens

# Checking a grammar takes tens of milliseconds at most; longer means that many wait.
THREADS = 2
TIMEOUT_S = 10.0


class Structure:
    """Gives requests the grammar that their format, tools and tool choice ask for."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    async def apply(self, model: ServedModel, request: GenerateRequest, ids: np.ndarray) -> GenerateRequest:
        """``request``, whose prompt is ``ids``, with its grammar. Raises `InvalidInput` for one that can't be used."""
        if not needs_grammar(request):
            return request
        work = asyncio.get_running_loop().run_in_executor(self._threads, _grammar, model, request, ids)
        try:
            grammar = await asyncio.wait_for(work, TIMEOUT_S)
        except TimeoutError:
            raise OutOfCapacity("Too many schemas are being checked, please try again.") from None
        return replace(request, sampling=replace(request.sampling, grammar=grammar))


def _grammar(model: ServedModel, request: GenerateRequest, ids: np.ndarray) -> str | None:
    record, tokenizer = model.record, model.tokenizer
    marks = None if record.reasoning_parser == "none" or request.raw else MARKS[record.reasoning_parser]
    inside = False
    if marks is not None:
        inside = opens(tokenizer.decode(ids[-TAIL_CHARS:].tolist(), skip_special_tokens=False), marks)
    token = token_rule(tokenizer)
    return answer_grammar(request, token=token, family=record.tool_parser, marks=marks, inside=inside)
