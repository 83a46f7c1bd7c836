"""Calls of requests, many in one: a call through Serve costs three processes more than a short answer does.

::

    generate ─┐                            ┌─ Ended over the channel: this one, now
    generate ─┼─ one call, to one worker ──┤
    generate ─┘                            └─ the call's answer: all of them, at the end

Nobody waits for a batch request's first token, so it waits a moment for others that go to the same worker. Other
requests wait only where one has just gone there and has not had all of its tokens: alone they lose nothing, and among
many the worker takes them up in one step anyway. Each ends by itself. What the channel does not bring is in the call's
answer, and a lost worker is the loss of all that are left.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context

from serve_app.api.errors import OutOfCapacity
from serve_app.channel.inbox import TokenInbox
from serve_app.gateway.dispatch.ticket import Destination
from serve_app.tasks.calls import Call
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import WorkerGone
from serve_app.wire.generate import HERE, GenerateCall, GenerateMany, GenerateResult, read_ending
from serve_app.wire.message import BadMessage
from serve_app.wire.methods import GENERATE, GENERATE_MANY

log = logging.getLogger("ray.serve")

# How long the first batch request of a bundle waits for others; how long after the last call to a worker, while it
# works for any, the next one goes (with 32 clients whose answers are one token, 4 to 7 requests are a call then); and
# how many go at once.
WAIT_S = 0.01
APART_S = 0.004
MOST = 64

# A model, stage and replica, and whether it is for batches.
_Key = tuple[str, str, str, bool]


class _Alone(Exception):
    """The call of a bundle has failed as a whole, for one of its requests or because the replica knows no bundles."""


class _Bundle:
    """``waiting``: of each request without an end, who waits for it."""

    def __init__(self, key: _Key, model: ServedModel, to: Destination) -> None:
        self.key = key
        self.model = model
        self.to = to
        self.calls: list[GenerateCall] = []
        self.waiting: dict[str, asyncio.Future[GenerateResult]] = {}
        self.task: asyncio.Task[None] | None = None


class Bundles:
    """Of one gateway. It hears on ``inbox`` how requests end."""

    def __init__(self, inbox: TokenInbox, call: Call) -> None:
        self._call = call
        # Those that more may come to; of each request under way its bundle; and of each worker the requests whose
        # tokens have not all come, and when the last call went there (loop's time).
        self._open: dict[_Key, _Bundle] = {}
        self._bundle_of: dict[str, _Bundle] = {}
        self._under_way: dict[_Key, set[str]] = {}
        self._last: dict[_Key, float] = {}
        inbox.on_ended = self._ended

    def takes(self, call: GenerateCall, to: Destination) -> bool:
        """Whether a call may go with others: its worker is known to reach this gateway and prefills itself, and what it
        tells at the end fits into a frame.
        """
        return bool(to.replica) and to.prefill == HERE and call.sampling.prompt_logprobs is None

    async def generate(self, model: ServedModel, call: GenerateCall, to: Destination) -> GenerateResult:
        """As a call of its own would. Cancelling it ends the request there, at its next tokens where others of its
        bundle go on.
        """
        key = (model.id, to.stage, to.replica, call.priority == "batch")
        bundle = self._open.get(key)
        if bundle is None:
            bundle = self._open[key] = _Bundle(key, model, to)
            loop = asyncio.get_running_loop()
            if call.priority == "batch":
                at = loop.time() + WAIT_S
            else:
                at = self._last[key] + APART_S if key in self._last else loop.time()
            # What belongs to the first of them (its client, its trace) does not belong to the call.
            loop.call_at(at, self._send, key, bundle, context=Context())
        end = bundle.waiting[call.id] = asyncio.get_running_loop().create_future()
        self._bundle_of[call.id] = bundle
        bundle.calls.append(call)
        if len(bundle.calls) >= MOST:
            self._open.pop(key)
        try:
            return await end
        except _Alone:
            return await self._call(model, GENERATE, call, to.stage, to.replica)
        finally:
            self.told(call.id)
            bundle.waiting.pop(call.id, None)
            self._bundle_of.pop(call.id, None)
            if end.cancelled() and not bundle.waiting and bundle.task is not None:
                bundle.task.cancel()

    def told(self, request_id: str) -> None:
        """All tokens of a request have come: its worker is done with it, though its call may not have ended."""
        if (bundle := self._bundle_of.get(request_id)) is None:
            return
        under_way = self._under_way.get(bundle.key, set())
        if request_id in under_way:
            under_way.remove(request_id)
            if not under_way:
                del self._under_way[bundle.key], self._last[bundle.key]

    def _send(self, key: _Key, bundle: _Bundle) -> None:
        if self._open.get(key) is bundle:
            del self._open[key]
        # Some may have been left meanwhile.
        bundle.calls = [call for call in bundle.calls if call.id in bundle.waiting]
        if bundle.calls:
            self._under_way.setdefault(key, set()).update(call.id for call in bundle.calls)
            self._last[key] = asyncio.get_running_loop().time()
            bundle.task = asyncio.ensure_future(self._carry(bundle))

    async def _carry(self, bundle: _Bundle) -> None:
        calls, model, to = bundle.calls, bundle.model, bundle.to
        try:
            if len(calls) == 1:
                results: tuple[GenerateResult, ...] = (
                    await self._call(model, GENERATE, calls[0], to.stage, to.replica),
                )
            else:
                many = await self._call(model, GENERATE_MANY, GenerateMany(tuple(calls)), to.stage, to.replica)
                results = many.results
        except asyncio.CancelledError:
            self._fail(bundle, WorkerGone("its call was cancelled"))
            raise
        except (WorkerGone, OutOfCapacity) as error:
            self._fail(bundle, error)
            return
        except Exception as error:
            log.warning("%d requests that went together are sent one by one (%s)", len(calls), type(error).__name__)
            self._fail(bundle, _Alone())
            return
        for call, result in zip(calls, results, strict=True):
            self._resolve(call.id, result)

    def _ended(self, request_id: str, result: bytes) -> None:
        """A worker tells how a request has ended."""
        if request_id not in self._bundle_of:
            return
        try:
            self._resolve(request_id, read_ending(result))
        except BadMessage as error:
            log.warning("the end of %s can't be read: %s", request_id, error)

    def _resolve(self, request_id: str, result: GenerateResult) -> None:
        bundle = self._bundle_of.get(request_id)
        if bundle is not None and not (end := bundle.waiting[request_id]).done():
            end.set_result(result)

    def _fail(self, bundle: _Bundle, error: Exception) -> None:
        for end in list(bundle.waiting.values()):
            if not end.done():
                end.set_exception(error)
