"""Reranking: a query and contexts in, scores out."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from serve_app.api.types import ModelLimits, RerankRequest, Usage
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.encoding import estimate_reading
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.model import ServedModel
from serve_app.tasks.reranking.declaration import DECLARATION
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.reranking.run import pairs, rerank
from serve_app.tasks.reranking.schema import input_schema, output_schema
from serve_app.tasks.reranking.write import render_rerank
from serve_app.tasks.task import Answer, Body, Task
from serve_app.tasks.work import Runtime


class Reranking(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = RerankRequest

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> RerankRequest:
        return parse_rerank(body.json, model.id)

    async def run(
        self, runtime: Runtime, model: ServedModel, request: RerankRequest, caller: Caller
    ) -> tuple[np.ndarray, Usage]:
        return await rerank(runtime, model, request, caller)

    async def estimate(self, runtime: Runtime, model: ServedModel, request: RerankRequest, caller: Caller) -> Estimate:
        return estimate_reading(runtime, model, [ids for ids, _ in await pairs(model, request)])

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: RerankRequest, result: tuple[np.ndarray, Usage]
    ) -> Answer:
        return Answer(render_rerank(request, *result))


TASK = Reranking()
