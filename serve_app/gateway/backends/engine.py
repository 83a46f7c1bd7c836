"""Text generation as the gateway sees it: token ids go to a decode replica, token frames come back, text goes out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

import numpy as np

from serve_app.api.collect import merge
from serve_app.api.decisions import DecideRequest, Decisions
from serve_app.api.errors import InvalidInput
from serve_app.api.types import ChoiceDone, Event, GenerateRequest, ModelLimits, Usage
from serve_app.channel.inbox import TokenInbox
from serve_app.channel.served import gateway_name
from serve_app.gateway.backends import deciding
from serve_app.gateway.backends.attempts import Attempts, Job
from serve_app.gateway.backends.elsewhere import Elsewhere, Passed
from serve_app.gateway.backends.media import Looker
from serve_app.gateway.backends.structure import Structure
from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.gateway.dispatch.ticket import Ticket
from serve_app.gateway.models import up
from serve_app.gateway.resume import log as resume
from serve_app.kv.keys import BLOCK_TOKENS, all_over, block_keys, media_parts, root_key, tenant_id
from serve_app.routing.types import RouteRequest
from serve_app.sampling_params import PromptLogprobs, SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.backend import Prepared, PreparedQuestions
from serve_app.tasks.calls import AskAll, Call
from serve_app.tasks.estimate import Foreseen
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Work
from serve_app.text.chat_template import strings
from serve_app.text.control import NoCopy
from serve_app.text.media import Placed
from serve_app.text.output import open_output
from serve_app.text.prompt import Prompt, file_parts, fit_context, read_prompt
from serve_app.text.prompt_tokens import prompt_tokens
from serve_app.wire.generate import AdapterAt, GenerateCall, MediaAt
from serve_app.wire.load import ADAPTER_BYTES
from serve_app.wire.tokens import TokenItem

# The stage that requests are sent to.
HOME = "decode"
# Longer prompts are tokenised off the event loop.
INLINE_CHARS = 20_000
# Tokens of a batch request that come together: nobody reads them before the end.
TOGETHER = 32
# Log-probabilities of prompts in one answer.
MAX_TOLD = 1 << 20


class EngineBackend:
    """Runs requests on replicas; with ``ask_all`` it asks them for tokens that the channel does not bring."""

    def __init__(self, inbox: TokenInbox, call: Call, ask_all: AskAll | None = None) -> None:
        self._inbox = inbox
        self._dispatchers: dict[str, Dispatcher] = {}
        self._call = call
        self._attempts = Attempts(inbox, call, ask_all)
        self._structure = Structure()
        self._looker = Looker()
        # Of the node that this gateway is on.
        self.zone = ""
        self.elsewhere: Elsewhere | None = None

    def dispatcher(self, model: ServedModel) -> Dispatcher:
        """Who decides when and where the model's requests go."""
        found = self._dispatchers.get(model.id)
        if found is None:
            found = self._dispatchers[model.id] = Dispatcher(model, name=lambda: gateway_name(self._inbox.address))
        return found

    def forget(self, model: ServedModel) -> None:
        """The model is served no more: should it come back, it comes with workers that nobody knows."""
        self._dispatchers.pop(model.id, None)

    def lost(self, model: ServedModel, process: str) -> None:
        """The connection of a worker has ended: nothing new goes there, and what is there does not wait for long."""
        self.dispatcher(model).lost(process)
        self._attempts.lost(model)

    def close(self) -> None:
        """Ends the processes that look at pictures and sounds."""
        self._looker.close()

    def serves(self, model: ServedModel) -> bool:
        """Whether engine workers are the model's own."""
        return model.first_stage == HOME

    def limits(self, model: ServedModel) -> ModelLimits:
        return model.limits

    async def foresee(self, model: ServedModel, prepared: Prepared, caller: Caller, salt: bytes) -> Foreseen:
        dispatcher = self.dispatcher(model)
        return await dispatcher.foresee(_route_request(dispatcher, prepared, salt, caller, self.zone))

    def waiting(self, model: ServedModel) -> str:
        return self.dispatcher(model).waiting()

    async def count_tokens(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> int:
        request = await self._looker.look(model, request, salt)
        return len((await asyncio.to_thread(read_prompt, model.tokenizer, request)).ids)

    async def prepare(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> Prepared:
        """The request with limits that fit, and its prompt. Raises what the client should see."""
        request = await self._looker.look(model, request, salt)
        window = model.context_window
        prompt = None
        # What stands for files is longer than anything that was sent.
        seen = any(map(file_parts, request.messages or ()))
        if not seen and sum(map(len, strings([request.prompt, request.messages, request.tools]))) <= INLINE_CHARS:
            with contextlib.suppress(NoCopy):
                prompt = read_prompt(model.tokenizer, request, context_window=window, at_once=True)
        if prompt is None:
            prompt = await asyncio.to_thread(read_prompt, model.tokenizer, request, context_window=window)
        tokens = len(prompt.ids)
        _check_told(request, tokens)
        if window is not None:
            request = fit_context(request, tokens, window)
        return Prepared(await self._structure.apply(model, request, prompt.ids), tokens, prompt)

    async def prepare_questions(self, model: ServedModel, request: DecideRequest) -> PreparedQuestions:
        """The questions as token ids. Raises what the client should see."""
        return await deciding.prepare(model, request)

    async def decide(self, prepared: PreparedQuestions, work: Work) -> Decisions:
        self._check_here(work.model)
        route = partial(_route_request, zone=self.zone)
        return await deciding.decide(prepared, work, self.dispatcher(work.model), self._call, route)

    async def events(self, prepared: Prepared, work: Work) -> AsyncGenerator[Event, None]:
        """The request's events. Closing the iterator ends the request wherever it is."""
        request, tokens = prepared.request, prepared.prompt_tokens
        dispatcher = self.dispatcher(work.model)
        route = _route_request(dispatcher, prepared, work.salt, work.caller, self.zone)
        ticket = Ticket(route, work.trace)
        passed: Passed | None = None
        usages = [Usage() for _ in range(request.n)]
        sent = [0] * request.n

        def look() -> None:
            usage = work.usage
            usage.completion_tokens = sum(u.completion_tokens for u in usages)
            work.longest = max(u.completion_tokens for u in usages)
            usage.prompt_tokens = tokens if ticket.started or passed or usage.completion_tokens else 0
            usage.reasoning_tokens = sum(u.reasoning_tokens for u in usages)
            usage.cached_tokens = usages[0].cached_tokens
            work.sent = sum(sent)

        work.look = look
        try:
            if self.elsewhere is not None:
                passed = await self.elsewhere.passed(prepared, work, route, dispatcher)
            if passed is None:
                await self._enter(ticket, work)
            job = Job(work, dispatcher, ticket, passed)
            choices = [self._choice(job, prepared, i, usages[i], sent) for i in range(request.n)]
            async for event in _merge_choices(choices):
                if request.continuous_usage:
                    told = sum(u.completion_tokens for u in usages)
                    yield Usage(tokens, told, usages[0].cached_tokens, final=False)
                yield event
        finally:
            look()
            dispatcher.finish(ticket, cached=work.usage.cached_tokens, output=work.usage.completion_tokens)
            if passed is not None:
                await passed.aclose()

    async def tokens(
        self,
        ids: np.ndarray,
        sampling: SamplingParams,
        route: RouteRequest,
        work: Work,
        *,
        together: int,
        origin: tuple[str, str],
    ) -> AsyncGenerator[TokenItem, None]:
        """The tokens of one request that comes as token ids, from this cluster's workers. Closing the iterator ends it
        wherever it is. ``together``, ``origin``: as in :class:`GenerateCall`.
        """
        dispatcher, caller, usage = self.dispatcher(work.model), work.caller, work.usage
        ticket = Ticket(route, work.trace)
        call = GenerateCall(
            "", b"", work.salt, sampling, self._inbox.address, route.priority, share=caller.share,
            weight=caller.weight, together=together, origin=origin,
        )  # fmt: skip
        try:
            await self._enter(ticket, work)
            items = self._attempts.tokens(Job(work, dispatcher, ticket), call, ids, [], None)
            async with contextlib.aclosing(items):
                async for item in items:
                    usage.prompt_tokens = len(ids)
                    usage.completion_tokens += len(item.ids)
                    if item.cached is not None:
                        usage.cached_tokens = item.cached
                    yield item
        finally:
            work.longest = usage.completion_tokens
            dispatcher.finish(ticket, cached=usage.cached_tokens, output=usage.completion_tokens)

    def _check_here(self, model: ServedModel) -> None:
        """Raises `ModelLoading` for a request that was let in for another cluster's sake alone."""
        if self.elsewhere is not None:
            up(model, model.id, here=True)

    async def _enter(self, ticket: Ticket, work: Work) -> None:
        """Waits for the request's turn with this cluster's workers."""
        self._check_here(work.model)
        await self.dispatcher(work.model).enter(ticket)
        work.placed, work.placed_at = True, time.monotonic()

    async def _choice(
        self, job: Job, prepared: Prepared, index: int, usage: Usage, sent: list[int]
    ) -> AsyncIterator[Event]:
        """Counts its tokens in ``usage``, and in ``sent[index]`` those whose events were taken."""
        request, prompt = prepared.request, prepared.prompt
        ids = prompt.ids
        model = job.model
        record = model.record
        parsers = {"tool_parser": record.tool_parser, "reasoning_parser": record.reasoning_parser}
        output = open_output(model.tokenizer, request, ids, index=index, **parsers)
        sampling = request.sampling
        if index:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + index)
        priority, caller = job.ticket.request.priority, job.work.caller
        adapter = None if request.adapter is None else AdapterAt(request.adapter.digest, request.adapter.size)
        call = GenerateCall(
            "",
            b"",
            job.work.salt,
            sampling,
            self._inbox.address,
            priority,
            share=caller.share,
            adapter=adapter,
            weight=caller.weight,
            together=TOGETHER if priority == "batch" and not output.may_stop else 1,
            origin=(job.work.trace.id, job.work.trace.trace_id),
            media=tuple(map(_media_at, prompt.media)),
        )
        told: list[PromptLogprobs] = []
        resumable = resume.current.get()
        kept = None if resumable is None else resumable.tokens(request.number, index)
        items = self._attempts.tokens(job, call, ids, told, kept)
        finish = "stop"
        generated: list[int] = []
        prompted = not request.tells_prompt
        try:
            async for item in items:
                if not prompted:
                    prompted = True
                    yield prompt_tokens(model.tokenizer, request, ids, index, told[-1] if told else None)
                if request.prompt_only:
                    usage.cached_tokens = item.cached or usage.cached_tokens
                    finish = "length"
                    continue
                if item.cached is not None:
                    usage.cached_tokens = item.cached
                usage.completion_tokens += len(item.ids)
                finish = item.finish or finish
                if request.return_token_ids:
                    generated += item.ids
                events = output.feed(item.ids, item.logprobs)
                for event in events:
                    yield _with_ids(event, generated) if generated else event
                if events:
                    # Who asks for more has taken these.
                    sent[index] = usage.completion_tokens - output.held
                if output.done:
                    return
            job.work.cut |= finish == "length"
            for event in output.finish(finish):
                yield _with_ids(event, generated) if generated else event
        finally:
            usage.reasoning_tokens = output.reasoning_tokens
            await items.aclose()


def _check_told(request: GenerateRequest, tokens: int) -> None:
    """Refuses an answer of millions of numbers."""
    top = request.sampling.prompt_logprobs
    if top is None:
        return
    numbers = tokens * (1 + top) * request.n
    if numbers > MAX_TOLD:
        raise InvalidInput(
            f"Log-probabilities of {tokens} prompt tokens with {top} alternatives each are {numbers} numbers; "
            f"one answer has at most {MAX_TOLD}. Ask for fewer alternatives, or send the prompt in parts.",
            param="prompt_logprobs",
        )


def _route_request(dispatcher: Dispatcher, prepared: Prepared, salt: bytes, caller: Caller, zone: str) -> RouteRequest:
    """The request as routing sees it. Keys are salted: one tenant's prefixes are no other's, nor one adapter's."""
    request, prompt = prepared.request, prepared.prompt
    assert isinstance(prompt, Prompt)
    ids = prompt.ids
    adapter = "" if request.adapter is None else request.adapter.digest
    per_key = dispatcher.chunk_tokens // BLOCK_TOKENS
    # Where something is to be told of the prompt, nothing that is stored of it helps.
    stored = ids[:0] if request.sampling.prompt_logprobs is not None else ids
    media = [part for p in prompt.media for part in media_parts(p.file.digest, p.places, p.grid)]
    if any(p.beside for p in prompt.media):
        media = [*all_over(digest for _, _, digest in media), *media]
    every = block_keys(root_key(dispatcher.weights, adapter, salt), stored, media=media)
    keys = every[per_key - 1 :: per_key]
    dispatcher.know(tenant_id(salt).hex(), caller.account)
    now = dispatcher.now()
    return RouteRequest(
        id=secrets.token_hex(8),
        prompt_tokens=len(ids),
        keys=keys,
        max_tokens=request.sampling.max_tokens,
        streams=request.n,
        session=None if request.session is None else f"{caller.account}\0{request.session}",
        tenant=caller.account,
        weight=caller.weight,
        priority=caller.priority,
        arrived_at=now,
        deadline=None if request.deadline_s is None else now + request.deadline_s,
        reject_if_busy=request.reject_if_busy,
        adapter=bytes.fromhex(adapter)[:ADAPTER_BYTES],
        adapter_bytes=0 if request.adapter is None else request.adapter.size,
        zone=zone,
    )


def _media_at(placed: Placed) -> MediaAt:
    file = placed.file
    return MediaAt(file.medium, file.data, file.digest, placed.places, placed.grid)


def _with_ids(event: Event, generated: list[int]) -> Event:
    """The end of a choice with all of its token ids."""
    return dataclasses.replace(event, token_ids=tuple(generated)) if isinstance(event, ChoiceDone) else event


def _merge_choices(choices: list[AsyncIterator[Event]]) -> AsyncIterator[Event]:
    """Several choices' events as they come, without renumbering: each already carries its index."""
    return choices[0] if len(choices) == 1 else _merged(choices)


async def _merged(choices: list[AsyncIterator[Event]]) -> AsyncIterator[Event]:
    async for event in merge(choices, choices_each=0):
        if not isinstance(event, Usage):
            yield event
