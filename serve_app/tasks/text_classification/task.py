"""Text classification: a text in, a score for each class out, the model's own or those that the client names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from serve_app.api.envelopes import success
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import boolean, string
from serve_app.api.types import ModelLimits, TaskRequest
from serve_app.api.workers_ai.read import open_native
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.candidates import LABELS, Candidates, read_candidates
from serve_app.tasks.encoding import estimate_reading, tokenise
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict
from serve_app.tasks.task import Answer, Body, Task
from serve_app.tasks.text_classification.declaration import DECLARATION
from serve_app.tasks.text_classification.schema import TEMPLATE, input_schema, output_schema
from serve_app.tasks.work import Runtime


@dataclass(slots=True)
class ClassifyTextRequest(TaskRequest):
    """``candidates``: the classes, instead of the model's own. ``alone``: each has a score of its own."""

    text: str
    candidates: Candidates | None = None
    alone: bool = False


class TextClassification(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = ClassifyTextRequest

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> ClassifyTextRequest:
        return parse_text(body.json)

    async def run(
        self, runtime: Runtime, model: ServedModel, request: ClassifyTextRequest, caller: Caller
    ) -> list[dict[str, Any]]:
        ids, inputs = await _read(model, request)
        count, named = sum(map(len, ids)), request.candidates
        busy, facts, worst = request.reject_if_busy, {"prompt_tokens": count}, {"input_tokens": count}
        options = {"follows": named is not None}
        async with runtime.work(model, caller, reject_if_busy=busy, facts=facts, worst=worst) as work:
            found: list[Any] = await predict(runtime, work, inputs, options, tokens=count)
        return found[0] if named is None else scored(named.labels, found, alone=request.alone)

    async def estimate(
        self, runtime: Runtime, model: ServedModel, request: ClassifyTextRequest, caller: Caller
    ) -> Estimate:
        return estimate_reading(runtime, model, (await _read(model, request))[0])

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: ClassifyTextRequest, result: list[dict[str, Any]]
    ) -> Answer:
        return Answer(success(result))


def parse_text(body: bytes | dict[str, Any]) -> ClassifyTextRequest:
    """``{text, candidate_labels, hypothesis_template, multi_label}``."""
    body, asked = open_native(body)
    text = string(body, "text")
    if not text:
        message = "Input does not match the model's schema: required: text (a non-empty string)."
        raise InvalidInput(message, param="text")
    named, alone = read_candidates(body, TEMPLATE), boolean(body, "multi_label") or False
    if alone and named is None:
        raise InvalidInput(f"multi_label is for {LABELS}, which are missing.", param="multi_label")
    return ClassifyTextRequest(text, named, alone, **asked)


def scored(labels: Sequence[str], logits: Sequence[Sequence[float]], *, alone: bool) -> list[dict[str, Any]]:
    """Classes with their scores, best first. ``logits``: of each class, that its sentence does not follow from the text
    and that it does. As transformers' ``zero-shot-classification``: a class that stands ``alone``, as the only one does
    in any case, has the share of these two, others share 1 by the second.
    """
    both = np.asarray(logits, np.float64)
    against = both if alone or len(labels) == 1 else np.broadcast_to(both[:, 1], (len(labels), len(labels)))
    likely = 1 / np.exp(against - both[:, 1:]).sum(1)
    order = np.argsort(-likely, kind="stable")
    return [{"label": labels[i], "score": float(likely[i])} for i in order.tolist()]


async def _read(model: ServedModel, request: ClassifyTextRequest) -> tuple[list[np.ndarray], list[bytes]]:
    """The sequences that the model reads, int32, and how its worker gets them: the text, or it and the sentence of each
    class, a pair's token types behind its ids. Raises `InputTooLong`.
    """
    if request.candidates is None:
        ids = await tokenise(model, model.tokenizer.encode_batch, [request.text])
        return ids, [one.tobytes() for one in ids]
    texts = [(request.text, sentence) for sentence in request.candidates.sentences]
    pairs = await tokenise(model, model.tokenizer.encode_pairs, texts)
    return [ids for ids, _ in pairs], [ids.tobytes() + types.tobytes() for ids, types in pairs]


TASK = TextClassification()
