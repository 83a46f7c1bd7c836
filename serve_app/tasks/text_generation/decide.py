"""Decisions of text models: what they would answer to questions about one text, without an answer being written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.api.decisions import DecideRequest, Decisions, answers
from serve_app.api.envelopes import success
from serve_app.api.receipt import receipt
from serve_app.api.schema.parts import Schema, field, object_
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimate, Foreseen, estimate_of
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime


async def decide(runtime: Runtime, model: ServedModel, request: DecideRequest, caller: Caller) -> Decisions:
    """Every token that is read counts once; none is written."""
    if request.lora:
        request = replace(request, adapter=await runtime.adapter(model, caller, request.lora))
    backend = runtime.backend(model)
    prepared = await backend.prepare_questions(model, request)
    facts = {"prompt_tokens": prepared.tokens, "questions": len(request.questions)}
    async with runtime.work(
        model,
        caller,
        reject_if_busy=request.reject_if_busy,
        facts=facts,
        worst={"input_tokens": prepared.tokens},
        adapter="" if request.adapter is None else request.adapter.id,
    ) as work:
        found = await backend.decide(prepared, work)
    return replace(found, usage=work.usage)


async def estimate_decisions(runtime: Runtime, model: ServedModel, request: DecideRequest, caller: Caller) -> Estimate:
    if request.lora:
        request = replace(request, adapter=await runtime.adapter(model, caller, request.lora))
    prepared = await runtime.backend(model).prepare_questions(model, request)
    units = {"input_tokens": prepared.tokens}
    quote = runtime.quote(model, "" if request.adapter is None else request.adapter.id)
    return estimate_of(quote, model, units, units, units, Foreseen(output_tokens=0))


def render_decisions(request: DecideRequest, found: Decisions) -> dict[str, Any]:
    usage = found.usage
    told = {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": 0,
        "cached_tokens": usage.cached_tokens,
        **receipt(usage),
    }
    return success({"model": request.model, "answers": answers(request, found), "usage": told})


def input_schema() -> Schema:
    anything = {"description": "A text, or JSON, which is read as a text.", "type": ["string", "object", "array"]}
    question = object_(
        {
            "type": {"type": "string", "enum": ["noul", "boolean", "choice", "score"]},
            "instructions": {**anything, "description": "What is asked."},
            "criteria": field(
                ["object", "array", "null"],
                "What true and false mean; options by name, 2 to 26, with what each means; or 2 to 10 levels, the "
                "lowest first.",
            ),
        },
        ["type"],
    )
    return object_(
        {
            "state": {**anything, "description": "What all questions are about."},
            "questions": field(
                "object", "Up to 64 of them, by name.", minProperties=1, maxProperties=64, additionalProperties=question
            ),
            "calibrate": field("boolean", "Takes out what the model would say of no state at all.", default=False),
        },
        ["state", "questions"],
    )


def output_schema() -> Schema:
    answer = object_({"type": {"type": "string"}, "mass": {"type": "number"}}, ["type", "mass"])
    return object_(
        {
            "model": {"type": "string"},
            "answers": {"type": "object", "additionalProperties": answer},
            "usage": {"type": "object"},
        },
        ["answers", "usage"],
    )
