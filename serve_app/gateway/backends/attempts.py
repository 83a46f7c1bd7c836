"""A request's tokens across the loss of workers: each attempt is a call and a stream, and the next one goes on where
the last one ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextvars import Context
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from serve_app.api.errors import InvalidInput, WorkersLost
from serve_app.channel.inbox import Stream, TokenInbox
from serve_app.gateway.backends.bundles import Bundles
from serve_app.gateway.backends.elsewhere import Passed
from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.gateway.dispatch.ticket import Destination, Ticket
from serve_app.gateway.resume.log import ChoiceTokens
from serve_app.kv.cached_tokens import SOURCES
from serve_app.sampling_params import PromptLogprobs
from serve_app.tasks.calls import AskAll, Call
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import MAX_ATTEMPTS, Work, WorkerGone
from serve_app.wire.generate import CollectCall, Failed, GenerateCall, Generated
from serve_app.wire.methods import COLLECT, GENERATE
from serve_app.wire.tokens import TokenItem

log = logging.getLogger("ray.serve")

# A worker that is heard of sends over the channel; where that can't be opened, tokens are asked for instead.
CHANNEL_PATIENCE_S = 1.0
CHANNEL_CHECK_S = 2.0
# A worker may lose its connection and be back. One that is not back within this has gone with its replica, or is being
# replaced: a call that says nothing of it waits for the next replica, while others could go on.
BACK_WITHIN_S = 1.0


class RefusedByEngine(InvalidInput):
    """The engine can't run this request, wherever it goes."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The model refuses this request: {reason}.")


@dataclass(slots=True)
class Job:
    """What the choices of one request share."""

    work: Work
    dispatcher: Dispatcher
    ticket: Ticket
    # Where it is served instead, until it is lost there.
    passed: Passed | None = None

    @property
    def model(self) -> ServedModel:
        return self.work.model


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt: a call under way and its stream. ``asking``: fetches tokens that the channel does not bring."""

    job: Job
    stream: Stream
    began: float
    asking: asyncio.Task[None] | None = None


class Attempts:
    """Those under way at this gateway; with ``ask_all`` it asks workers for tokens that the channel does not bring."""

    def __init__(self, inbox: TokenInbox, call: Call, ask_all: AskAll | None) -> None:
        self._inbox = inbox
        self._call = call
        self._bundles = Bundles(inbox, call)
        self._ask_all = ask_all
        self._calls: set[asyncio.Task[None]] = set()
        self._running: dict[str, _Attempt] = {}
        self._watch: asyncio.Task[None] | None = None

    def lost(self, model: ServedModel) -> None:
        """The connection of a worker has ended."""
        if self._running:
            asyncio.get_running_loop().call_later(BACK_WITHIN_S, self._leave_lost, model)

    def _leave_lost(self, model: ServedModel) -> None:
        for one in list(self._running.values()):
            if one.job.model is model and one.job.dispatcher.gone(one.job.ticket):
                one.stream.fail(WorkerGone("its connection has ended"))

    async def tokens(
        self, job: Job, call: GenerateCall, prompt: np.ndarray, told: list[PromptLogprobs], kept: ChoiceTokens | None
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
        if job.passed is not None:
            async for item in job.passed.items():
                produced += item.ids
                yield item
                if item.finish is not None:
                    return
            await self._take_back(job, len(produced))
        for attempt in range(MAX_ATTEMPTS):
            resumed = np.concatenate([prompt, np.array(produced, np.int32)]).astype(np.int32)
            request_id = secrets.token_hex(16)
            sent = replace(call, id=request_id, ids=resumed.tobytes(), resumed=len(produced))
            waiting: list[TokenItem] = []
            chosen = job.ticket.decision
            items = self._attempt(job, sent, told)
            try:
                async for item in items:
                    if not job.ticket.started:
                        job.dispatcher.start(job.ticket)
                        job.work.first_at = job.work.first_at or time.monotonic()
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
                        # Nothing is left to wait for; left open, another task would be started to close it.
                        await items.aclose()
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
        raise WorkersLost

    async def _take_back(self, job: Job, tokens: int) -> None:
        """The cluster that a request was passed to has lost it, ``tokens`` of it told: it goes on here, like that of a
        lost worker.
        """
        job.ticket.trace.event("neighbour lost", tokens=tokens)
        if not job.model.ready:
            raise WorkersLost
        route = job.ticket.request
        # It has begun in time.
        route.deadline, route.reject_if_busy = None, False
        await job.dispatcher.enter(job.ticket)

    async def _attempt(
        self, job: Job, sent: GenerateCall, told: list[PromptLogprobs]
    ) -> AsyncGenerator[TokenItem, None]:
        """Follows one attempt: frames as they come, and from the unary call how it ended and what was not delivered."""
        to = job.dispatcher.destination(job.ticket)
        stream = self._inbox.open_stream(sent.id, sent.resumed, to.replica)
        one = self._running[sent.id] = _Attempt(job, stream, time.monotonic())
        job.work.hold()
        call = asyncio.ensure_future(self._complete(job, sent, to, stream, told))
        if self._ask_all is not None and (self._watch is None or self._watch.done()):
            # Nothing of the request that happens to be the first belongs to it.
            self._watch = asyncio.get_running_loop().create_task(self._watched(), context=Context())
        self._calls.add(call)
        call.add_done_callback(lambda _: self._called(job, call))
        try:
            async for item in stream:
                yield item
            await call
        finally:
            stream.close()
            self._bundles.told(sent.id)
            del self._running[sent.id]
            if one.asking is not None:
                one.asking.cancel()
            # A stream that has ended is followed by its call, which tells of the way the request took.
            if not call.done() and not stream.finished:
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    async def _watched(self) -> None:
        """While there are attempts: has tokens asked for that no connection has brought for a while."""
        while self._running:
            due = time.monotonic() - CHANNEL_PATIENCE_S
            for one in list(self._running.values()):
                if one.asking is None and one.began <= due and not one.stream.connected:
                    one.asking = asyncio.ensure_future(self._ask(one.job, one.stream))
            await asyncio.sleep(CHANNEL_PATIENCE_S / 2)

    async def _ask(self, job: Job, stream: Stream) -> None:
        """While no connection brings the stream's tokens, fetches them by calls: slower, but no less right."""
        assert self._ask_all is not None
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

    async def _complete(
        self, job: Job, sent: GenerateCall, to: Destination, stream: Stream, told: list[PromptLogprobs]
    ) -> None:
        try:
            whole = replace(sent, prefill=to.prefill)
            if self._bundles.takes(whole, to):
                result = await self._bundles.generate(job.model, whole, to)
            else:
                result = await self._call(job.model, GENERATE, whole, to.stage, to.replica)
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

    def _follow(self, job: Job, result: Generated) -> None:
        """Adds to the request's trace where it was decoded, and counts where its prompt came from."""
        job.ticket.trace.event("decoded", replica=result.replica, **result.path.shown())
        job.dispatcher.count_prompt({source: getattr(result.path, source) for source in SOURCES})

    def _called(self, job: Job, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        job.dispatcher.stream_ended(job.ticket)
        job.work.release()
