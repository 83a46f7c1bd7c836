"""Decisions on engine workers: one call with the shared beginning and all questions, to the worker that the dispatcher
chooses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from serve_app.api.decisions import DecideRequest, Decisions
from serve_app.api.errors import ContextTooLong, WorkersLost
from serve_app.api.types import GenerateRequest, Usage
from serve_app.gateway.backends.attempts import RefusedByEngine
from serve_app.gateway.dispatch.dispatcher import Dispatcher, Ticket
from serve_app.routing.types import RouteRequest
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.backend import Prepared, PreparedQuestions
from serve_app.tasks.calls import Call
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import MAX_ATTEMPTS, Work, WorkerGone
from serve_app.text.prompt import Prompt
from serve_app.text.questions import NOTHING, QuestionPrompts, asking, question_prompts
from serve_app.wire.decide import Branch, DecideCall, Decided
from serve_app.wire.generate import AdapterAt, Failed
from serve_app.wire.methods import DECIDE

Route = Callable[[Dispatcher, Prepared, bytes, Caller], RouteRequest]


async def prepare(model: ServedModel, request: DecideRequest) -> PreparedQuestions:
    """The questions about the state; and about nothing, where the answers are to be calibrated. Raises what the client
    should see.
    """

    def tokenised() -> tuple[QuestionPrompts, ...]:
        states = (request.state, NOTHING) if request.calibrate else (request.state,)
        return tuple(question_prompts(model.tokenizer, state, request.questions) for state in states)

    window = model.context_window
    if window is not None:
        least = model.tokenizer.min_tokens(request.state)
        # Before anything is tokenised, which takes its time.
        least += max(model.tokenizer.min_tokens(asking(question)) for question in request.questions)
        if least >= window:
            raise ContextTooLong(least, 1, window, at_least=True)
    prompts = await asyncio.to_thread(tokenised)
    if window is not None and prompts[0].longest >= window:
        raise ContextTooLong(prompts[0].longest, 1, window)
    return PreparedQuestions(request, sum(one.tokens for one in prompts), prompts)


async def decide(
    prepared: PreparedQuestions, work: Work, dispatcher: Dispatcher, call: Call, route: Route
) -> Decisions:
    """Answers the questions in one turn of the dispatcher: a single stream, whose every token is a prompt's."""
    request = prepared.request
    ids = np.concatenate([prepared.prompts[0].shared, *prepared.prompts[0].branches])
    asked = GenerateRequest(
        request.model, None, None, True, SamplingParams(max_tokens=1), session=request.session,
        deadline_s=request.deadline_s, reject_if_busy=request.reject_if_busy, adapter=request.adapter,
    )  # fmt: skip
    ticket = Ticket(
        route(dispatcher, Prepared(asked, prepared.tokens, Prompt(ids)), work.salt, work.caller), work.trace
    )
    ticket.request = replace(ticket.request, prompt_tokens=prepared.tokens)
    usage = work.usage
    try:
        await dispatcher.enter(ticket)
        work.placed = True
        found = []
        for prompts in prepared.prompts:
            told = await _answered(prompts, request, work, ticket, dispatcher, call)
            usage.prompt_tokens += prompts.tokens
            usage.cached_tokens += told.cached
            found.append(_scores(prompts, told))
        dispatcher.stream_ended(ticket)
    finally:
        dispatcher.finish(ticket, cached=usage.cached_tokens)
    return Decisions(found[0], found[1] if len(found) > 1 else (), Usage())


async def _answered(
    prompts: QuestionPrompts, request: DecideRequest, work: Work, ticket: Ticket, dispatcher: Dispatcher, call: Call
) -> Decided:
    """A lost worker costs time and nothing else."""
    branches = tuple(
        Branch(ids.tobytes(), np.array([token for tokens in labels for token in tokens], np.int32).tobytes())
        for ids, labels in zip(prompts.branches, prompts.labels, strict=True)
    )
    adapter = None if request.adapter is None else AdapterAt(request.adapter.digest, request.adapter.size)
    caller = work.caller
    for attempt in range(MAX_ATTEMPTS):
        sent = DecideCall(
            secrets.token_hex(16), prompts.shared.tobytes(), branches, work.salt, caller.priority, caller.share,
            adapter, caller.weight, (work.trace.id, work.trace.trace_id),
        )  # fmt: skip
        chosen, to = ticket.decision, dispatcher.destination(ticket)
        try:
            told = await call(work.model, DECIDE, sent, to.stage, to.replica)
            if isinstance(told, Failed):
                raise RefusedByEngine(told.error) if told.refused else WorkerGone(told.error)
        except WorkerGone:
            work.trace.event("worker lost", tokens=0)
            await asyncio.sleep(0.2 * attempt)
            await dispatcher.move(ticket, chosen)
            continue
        if not ticket.started:
            dispatcher.start(ticket)
        work.trace.event("decided", replica=told.replica, cached_tokens=told.cached)
        return told
    raise WorkersLost


def _scores(prompts: QuestionPrompts, told: Decided) -> tuple[tuple[float, ...], ...]:
    """Of each question, the logarithm of what each option's tokens have together."""
    found = []
    for raw, labels in zip(told.logprobs, prompts.labels, strict=True):
        values, at, scores = np.frombuffer(raw, np.float32).astype(np.float64), 0, []
        for tokens in labels:
            scores.append(float(np.logaddexp.reduce(values[at : at + len(tokens)])))
            at += len(tokens)
        found.append(tuple(scores))
    return tuple(found)
