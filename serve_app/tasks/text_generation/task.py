"""Text generation: prompts and conversations in, text and tool calls out, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from serve_app.api.decisions import DecideRequest, Decisions, parse_decide
from serve_app.api.types import Event, GenerateRequest, ModelLimits
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.model import ServedModel
from serve_app.tasks.task import Answer, Body, BodyLimits, Streamed, Task
from serve_app.tasks.text_generation.decide import decide, estimate_decisions, render_decisions
from serve_app.tasks.text_generation.declaration import DECLARATION
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.tasks.text_generation.run import estimate, generate
from serve_app.tasks.text_generation.schema import input_schema, output_schema
from serve_app.tasks.text_generation.write import frames, render_generate, stream_generate
from serve_app.tasks.work import Runtime


class TextGeneration(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = GenerateRequest

    def body_limit(self, settings: BodyLimits) -> int:
        """A prompt is bounded by a context window."""
        return settings.max_body_bytes

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(limits or ModelLimits()), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> GenerateRequest | DecideRequest:
        if body.json.get("questions") is not None:
            return parse_decide(body.json, model.id, limits)
        return parse_generate(body.json, model.id, limits)

    async def run(
        self, runtime: Runtime, model: ServedModel, request: GenerateRequest | DecideRequest, caller: Caller
    ) -> tuple[AsyncIterator[Event], int] | Decisions:
        if isinstance(request, DecideRequest):
            return await decide(runtime, model, request, caller)
        return await generate(runtime, model, request, caller)

    async def estimate(
        self, runtime: Runtime, model: ServedModel, request: GenerateRequest | DecideRequest, caller: Caller
    ) -> Estimate:
        if isinstance(request, DecideRequest):
            return await estimate_decisions(runtime, model, request, caller)
        return await estimate(runtime, model, request, caller)

    async def answer(
        self,
        runtime: Runtime,
        model: ServedModel,
        request: GenerateRequest | DecideRequest,
        result: tuple[AsyncIterator[Event], int] | Decisions,
    ) -> Answer | Streamed:
        if isinstance(request, DecideRequest):
            assert isinstance(result, Decisions)
            return Answer(render_decisions(request, result))
        assert isinstance(result, tuple)
        events, _ = result
        if not request.stream:
            return Answer(render_generate(request, [event async for event in events]))
        backend = runtime.backend(model)
        return Streamed(
            events,
            frames=lambda primed: stream_generate(request, primed),
            values=lambda primed: frames(request, primed),
            waiting=lambda: backend.waiting(model),
            resumable_s=request.resumable_s,
        )


TASK = TextGeneration()
