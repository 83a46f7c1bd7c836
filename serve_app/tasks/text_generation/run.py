"""Text generation: a request's events, from whatever backend its model has, and what they would cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from serve_app.api import identity
from serve_app.api.collect import begun_within
from serve_app.api.openai.write import close
from serve_app.api.types import Event, GenerateRequest
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.backend import Backend, Prepared
from serve_app.tasks.estimate import Estimate, estimate_of
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime


async def generate(
    runtime: Runtime, model: ServedModel, request: GenerateRequest, caller: Caller
) -> tuple[AsyncIterator[Event], int]:
    """The request's events, and how many tokens its prompt has; the prompt has been checked when this returns."""
    if identity.again():
        # It has been let in, and begun in time.
        request = replace(request, deadline_s=None, reject_if_busy=False)
    backend = runtime.backend(model)
    prepared = await _prepare(runtime, backend, model, request, caller)
    events = _events(runtime, backend, model, prepared, caller, runtime.request_id())
    if request.deadline_s is not None:
        events = begun_within(events, request.deadline_s)
    return events, prepared.prompt_tokens


async def estimate(runtime: Runtime, model: ServedModel, request: GenerateRequest, caller: Caller) -> Estimate:
    """A prompt is read once however many answers it has. All of it but its last token may come from a cache."""
    backend = runtime.backend(model)
    prepared = await _prepare(runtime, backend, model, request, caller)
    foreseen = await backend.foresee(model, prepared, caller, runtime.salt(caller.account))
    asked, prompt = prepared.request.sampling, prepared.prompt_tokens
    shortest, longest = (0, 0) if request.prompt_only else (asked.min_tokens, asked.max_tokens)
    usual = longest if foreseen.output_tokens is None else max(shortest, min(foreseen.output_tokens, longest))

    def used(cached: int, output: int) -> dict[str, int]:
        return {"input_tokens": prompt, "cached_tokens": cached, "output_tokens": output * request.n}

    told = request.sampling.prompt_logprobs is not None
    least, most = used(0 if told else max(prompt - 1, 0), shortest), used(0, longest)
    return estimate_of(
        runtime.quote(model, _adapter(prepared.request)),
        model,
        least,
        used(foreseen.cached_tokens, usual),
        most,
        foreseen,
    )


async def _prepare(
    runtime: Runtime, backend: Backend, model: ServedModel, request: GenerateRequest, caller: Caller
) -> Prepared:
    """The request, checked, with the adapter that it names."""
    if request.lora:
        request = replace(request, adapter=await runtime.adapter(model, caller, request.lora))
    return await backend.prepare(model, request, runtime.salt(caller.account))


def _adapter(request: GenerateRequest) -> str:
    return "" if request.adapter is None else request.adapter.id


async def _events(
    runtime: Runtime, backend: Backend, model: ServedModel, prepared: Prepared, caller: Caller, request_id: str
) -> AsyncIterator[Event]:
    """The backend's events and the usage, which comes when the ledger's entry is safe. Closing the iterator ends the
    request wherever it is.
    """
    request = prepared.request
    facts = {"prompt_tokens": prepared.prompt_tokens, "max_tokens": request.sampling.max_tokens}
    # Each choice is a stream of its own to the engine, and takes a place like one.
    places = runtime.work(
        model,
        caller,
        streams=request.n,
        reject_if_busy=request.reject_if_busy,
        request_id=request_id,
        number=request.number,
        shown=request.stream,
        facts=facts,
        worst={"input_tokens": prepared.prompt_tokens, "output_tokens": request.n * request.sampling.max_tokens},
        adapter=_adapter(request),
    )
    async with places as work:
        events = backend.events(prepared, work)
        try:
            async for event in events:
                yield event
        finally:
            await close(events)
    yield work.usage
