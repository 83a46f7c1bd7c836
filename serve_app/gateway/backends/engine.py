"""Text generation as the gateway sees it: token ids go to a decode replica, token frames come back, text goes out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from serve_app.api.collect import merge
from serve_app.api.errors import InvalidInput, OutOfCapacity
from serve_app.api.types import ChoiceDone, Event, GenerateRequest, ModelLimits, Usage
from serve_app.channel.inbox import Stream, TokenInbox
from serve_app.channel.served import gateway_name
from serve_app.gateway.backends.structure import Structure
from serve_app.gateway.dispatch.dispatcher import Dispatcher, Ticket
from serve_app.gateway.resume import log as resume
from serve_app.gateway.resume.log import ChoiceTokens
from serve_app.kv.cached_tokens import SOURCES
from serve_app.kv.keys import BLOCK_TOKENS, block_keys, root_key, tenant_id
from serve_app.routing.types import RouteRequest
from serve_app.sampling_params import PromptLogprobs
from serve_app.state.accounts import Caller
from serve_app.tasks.backend import Prepared
from serve_app.tasks.calls import AskAll, Call
from serve_app.tasks.estimate import Foreseen
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import MAX_ATTEMPTS, Work, WorkerGone
from serve_app.text.chat_template import strings
from serve_app.text.control import NoCopy
from serve_app.text.output import open_output
from serve_app.text.prompt import fit_context, prompt_ids
from serve_app.text.prompt_tokens import prompt_tokens
from serve_app.wire.generate import CollectCall, Failed, GenerateCall, Generated
from serve_app.wire.methods import COLLECT, GENERATE
from serve_app.wire.tokens import TokenItem

log = logging.getLogger("ray.serve")

# The stage that requests are sent to.
HOME = "decode"
# A worker that is heard of sends over the channel; where that can't be opened, tokens are asked for instead.
CHANNEL_PATIENCE_S = 1.0
CHANNEL_CHECK_S = 2.0
# A worker may lose its connection and be back. One that is not back within this has gone with its replica, or is being
# replaced: a call that says nothing of it waits for the next replica, while others could go on.
BACK_WITHIN_S = 1.0
# Longer prompts are tokenised off the event loop.
INLINE_CHARS = 20_000
# Log-probabilities of prompts in one answer.
MAX_TOLD = 1 << 20


class RefusedByEngine(InvalidInput):
    """The engine can't run this request, wherever it goes."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The model refuses this request: {reason}.")


@dataclass(slots=True)
class _Job:
    """What the choices of one request share."""

    work: Work
    dispatcher: Dispatcher
    ticket: Ticket

    @property
    def model(self) -> ServedModel:
        return self.work.model


class EngineBackend:
    """Runs requests on replicas; with ``ask_all`` it asks them for tokens that the channel does not bring."""

    def __init__(self, inbox: TokenInbox, call: Call, ask_all: AskAll | None = None) -> None:
        self._ask_all = ask_all
        self._inbox = inbox
        self._call = call
        self._dispatchers: dict[str, Dispatcher] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._attempts: dict[str, tuple[_Job, Stream]] = {}
        self._structure = Structure()

    def dispatcher(self, model: ServedModel) -> Dispatcher:
        """Who decides when and where the model's requests go."""
        found = self._dispatchers.get(model.id)
        if found is None:
            found = self._dispatchers[model.id] = Dispatcher(model, name=lambda: gateway_name(self._inbox.address))
        return found

    def lost(self, model: ServedModel, process: str) -> None:
        """The connection of a worker has ended: nothing new goes there, and what is there does not wait for long."""
        self.dispatcher(model).lost(process)
        if self._attempts:
            asyncio.get_running_loop().call_later(BACK_WITHIN_S, self._leave_lost, model)

    def _leave_lost(self, model: ServedModel) -> None:
        for job, stream in list(self._attempts.values()):
            if job.model is model and job.dispatcher.gone(job.ticket):
                stream.fail(WorkerGone("its connection has ended"))

    def serves(self, model: ServedModel) -> bool:
        """Whether engine workers are the model's own."""
        return model.first_stage == HOME

    def limits(self, model: ServedModel) -> ModelLimits:
        return model.limits

    def foresee(self, model: ServedModel, prepared: Prepared, caller: Caller, salt: bytes) -> Foreseen:
        dispatcher = self.dispatcher(model)
        return dispatcher.foresee(_route_request(dispatcher, prepared.request, prepared.prompt, salt, caller))

    def waiting(self, model: ServedModel) -> str:
        return self.dispatcher(model).waiting()

    async def count_tokens(self, model: ServedModel, request: GenerateRequest) -> int:
        return len(await asyncio.to_thread(prompt_ids, model.tokenizer, request))

    async def prepare(self, model: ServedModel, request: GenerateRequest) -> Prepared:
        """The request with limits that fit, and its prompt as token ids. Raises what the client should see."""
        window = model.context_window
        ids = None
        if sum(map(len, strings([request.prompt, request.messages, request.tools]))) <= INLINE_CHARS:
            with contextlib.suppress(NoCopy):
                ids = prompt_ids(model.tokenizer, request, context_window=window, at_once=True)
        if ids is None:
            ids = await asyncio.to_thread(prompt_ids, model.tokenizer, request, context_window=window)
        _check_told(request, len(ids))
        if window is not None:
            request = fit_context(request, len(ids), window)
        return Prepared(await self._structure.apply(model, request, ids), len(ids), ids)

    async def events(self, prepared: Prepared, work: Work) -> AsyncGenerator[Event, None]:
        """The request's events. Closing the iterator ends the request wherever it is."""
        request, ids = prepared.request, prepared.prompt
        dispatcher = self.dispatcher(work.model)
        route = _route_request(dispatcher, request, ids, work.salt, work.caller)
        ticket = Ticket(route, work.caller.weight, work.trace)
        usages = [Usage() for _ in range(request.n)]
        sent = [0] * request.n

        def look() -> None:
            usage = work.usage
            usage.completion_tokens = sum(u.completion_tokens for u in usages)
            usage.prompt_tokens = len(ids) if ticket.started or usage.completion_tokens else 0
            usage.reasoning_tokens = sum(u.reasoning_tokens for u in usages)
            usage.cached_tokens = usages[0].cached_tokens
            work.sent = sum(sent)

        work.look = look
        try:
            await dispatcher.enter(ticket)
            work.placed = True
            job = _Job(work, dispatcher, ticket)
            choices = [self._choice(job, request, ids, i, usages[i], sent) for i in range(request.n)]
            async for event in _merge_choices(choices):
                if request.continuous_usage:
                    told = sum(u.completion_tokens for u in usages)
                    yield Usage(len(ids), told, usages[0].cached_tokens, final=False)
                yield event
        finally:
            look()
            dispatcher.finish(ticket, cached=work.usage.cached_tokens, output=work.usage.completion_tokens)

    async def _choice(
        self, job: _Job, request: GenerateRequest, ids: np.ndarray, index: int, usage: Usage, sent: list[int]
    ) -> AsyncIterator[Event]:
        """Counts its tokens in ``usage``, and in ``sent[index]`` those whose events were taken."""
        model = job.model
        record = model.record
        parsers = {"tool_parser": record.tool_parser, "reasoning_parser": record.reasoning_parser}
        output = open_output(model.tokenizer, request, ids, index=index, **parsers)
        sampling = request.sampling
        if index:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + index)
        caller = job.work.caller
        call = GenerateCall("", b"", job.work.salt, sampling, self._inbox.address, caller.priority, share=caller.share)
        told: list[PromptLogprobs] = []
        resumable = resume.current.get()
        kept = None if resumable is None else resumable.tokens(request.number, index)
        items = self._tokens(job, call, ids, told, kept)
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
            for event in output.finish(finish):
                yield _with_ids(event, generated) if generated else event
        finally:
            usage.reasoning_tokens = output.reasoning_tokens
            await items.aclose()

    async def _tokens(
        self, job: _Job, call: GenerateCall, prompt: np.ndarray, told: list[PromptLogprobs], kept: ChoiceTokens | None
    ) -> AsyncGenerator[TokenItem, None]:
        """The request's tokens in order, each exactly once, across the loss of workers and, where they are ``kept``, of
        the gateway. Where something is to be told of the prompt it comes at the end, into ``told``; the tokens wait
        for it, and a loss begins anew.
        """
        produced: list[int] = []
        whole = call.sampling.prompt_logprobs is not None
        if whole:
            kept = None
        for item in kept.restored if kept is not None else ():
            produced += item.ids
            yield item
            if item.finish is not None:
                return
        for attempt in range(MAX_ATTEMPTS):
            resumed = np.concatenate([prompt, np.array(produced, np.int32)]).astype(np.int32)
            request_id = secrets.token_hex(16)
            sent = replace(call, id=request_id, ids=resumed.tobytes(), resumed=len(produced))
            waiting: list[TokenItem] = []
            chosen = job.ticket.decision
            try:
                async for item in self._attempt(job, sent, told):
                    if not job.ticket.started:
                        job.dispatcher.start(job.ticket)
                        job.ticket.trace.event("first token", cached_tokens=item.cached)
                    if whole:
                        waiting.append(item)
                        continue
                    # The client's prompt is charged as the first attempt found it.
                    if attempt or sent.resumed:
                        item = replace(item, cached=None)
                    produced += item.ids
                    if kept is not None:
                        kept.add(item)
                    yield item
                    if item.finish is not None:
                        return
                if whole:
                    for item in waiting:
                        yield item
                    return
            except WorkerGone as gone:
                log.warning(
                    "request %s lost its worker after %d tokens: %s", request_id, len(produced), gone.__cause__ or gone
                )
                job.ticket.trace.event("worker lost", tokens=len(produced))
                await asyncio.sleep(0.2 * attempt)
                await job.dispatcher.move(job.ticket, chosen)
        raise OutOfCapacity("The workers of this model were lost repeatedly; please try again.", retry_after=5.0)

    async def _attempt(self, job: _Job, sent: GenerateCall, told: list[PromptLogprobs]) -> AsyncIterator[TokenItem]:
        """Follows one attempt: frames as they come, and from the unary call how it ended and what was not delivered."""
        stream = self._inbox.open_stream(sent.id, sent.resumed)
        self._attempts[sent.id] = job, stream
        job.work.hold()
        call = asyncio.ensure_future(self._complete(job, sent, stream, told))
        asking = asyncio.ensure_future(self._ask(job, stream)) if self._ask_all is not None else None
        self._calls.add(call)
        call.add_done_callback(lambda _: self._called(job, call))
        try:
            async for item in stream:
                yield item
            await call
        finally:
            stream.close()
            del self._attempts[sent.id]
            if asking is not None:
                asking.cancel()
            # A stream that has ended is followed by its call, which tells of the way the request took.
            if not call.done() and not stream.finished:
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    async def _ask(self, job: _Job, stream: Stream) -> None:
        """While no connection brings the stream's tokens, fetches them by calls: slower, but no less right."""
        assert self._ask_all is not None
        await asyncio.sleep(CHANNEL_PATIENCE_S)
        while not stream.finished:
            fresh = 0
            if not stream.connected:
                call = CollectCall(stream.stream_id, stream.next_offset)
                stage = job.dispatcher.destination(job.ticket).stage
                try:
                    for collected in await self._ask_all(job.model, COLLECT, call, stage):
                        fresh += len(collected.items)
                        for item in collected.items:
                            stream.feed(item)
                except Exception as error:  # the call that carries the request's life says what is wrong
                    log.info("tokens of %s can't be asked for: %s", stream.stream_id, type(error).__name__)
            if not fresh:
                await asyncio.sleep(CHANNEL_CHECK_S if stream.connected else CHANNEL_PATIENCE_S)

    async def _complete(self, job: _Job, sent: GenerateCall, stream: Stream, told: list[PromptLogprobs]) -> None:
        try:
            to = job.dispatcher.destination(job.ticket)
            result = await self._call(job.model, GENERATE, replace(sent, prefill=to.prefill), to.stage, to.replica)
            if isinstance(result, Failed):
                raise RefusedByEngine(result.error) if result.refused else WorkerGone(result.error)
            if not isinstance(result, Generated):
                raise WorkerGone("the prompt was not prefilled")
            self._follow(job, result)
            if result.prompt_logprobs is not None:
                told.append(result.prompt_logprobs)
            for item in result.undelivered:
                stream.feed(item)
            if not stream.finished:
                raise WorkerGone("the answer is incomplete")
        except asyncio.CancelledError:
            # If it was not us, somebody still waits for tokens.
            stream.fail(WorkerGone("its call was cancelled"))
            raise
        except Exception as error:
            stream.fail(error)

    def _follow(self, job: _Job, result: Generated) -> None:
        """Adds to the request's trace where it was decoded, and counts where its prompt came from."""
        job.ticket.trace.event("decoded", replica=result.replica, **result.path.shown())
        job.dispatcher.count_prompt({source: getattr(result.path, source) for source in SOURCES})

    def _called(self, job: _Job, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        job.dispatcher.stream_ended(job.ticket)
        job.work.release()


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


def _route_request(
    dispatcher: Dispatcher, request: GenerateRequest, ids: np.ndarray, salt: bytes, caller: Caller
) -> RouteRequest:
    """The request as routing sees it. Keys are salted: one tenant's prefixes are no other's."""
    per_key = dispatcher.chunk_tokens // BLOCK_TOKENS
    # Where something is to be told of the prompt, nothing that is stored of it helps.
    stored = ids[:0] if request.sampling.prompt_logprobs is not None else ids
    keys = block_keys(root_key("", "", "", "", salt), stored)[per_key - 1 :: per_key]
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
        priority=caller.priority,
        arrived_at=now,
        deadline=None if request.deadline_s is None else now + request.deadline_s,
        reject_if_busy=request.reject_if_busy,
    )


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
