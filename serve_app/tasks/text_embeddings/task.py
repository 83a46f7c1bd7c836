"""Text embeddings: texts in, vectors out."""

from __future__ import annotations

from typing import Any, ClassVar

from serve_app.api.multi_vector import Reading
from serve_app.api.types import EmbedRequest, ModelLimits, Usage
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.encoding import estimate_reading
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.model import ServedModel
from serve_app.tasks.task import Answer, Body, Task
from serve_app.tasks.text_embeddings.declaration import DECLARATION
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_embeddings.run import embed, token_ids
from serve_app.tasks.text_embeddings.schema import input_schema, output_schema
from serve_app.tasks.text_embeddings.write import render_embed
from serve_app.tasks.work import Runtime


class TextEmbeddings(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = EmbedRequest

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> EmbedRequest:
        return parse_embed(body.json, model.id)

    async def run(
        self, runtime: Runtime, model: ServedModel, request: EmbedRequest, caller: Caller
    ) -> tuple[Reading, Usage]:
        return await embed(runtime, model, request, caller)

    async def estimate(self, runtime: Runtime, model: ServedModel, request: EmbedRequest, caller: Caller) -> Estimate:
        return estimate_reading(runtime, model, await token_ids(model, request))

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: EmbedRequest, result: tuple[Reading, Usage]
    ) -> Answer:
        return Answer(render_embed(request, *result, pooling=model.record.pooling))


TASK = TextEmbeddings()
