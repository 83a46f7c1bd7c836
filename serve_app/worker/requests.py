"""The requests in a worker, from their first call to their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from serve_app.engine.request import Request
from serve_app.kv.keys import tenant_id
from serve_app.sampling_params import PromptLogprobs, SamplingParams, TokenLogprobs
from serve_app.wire.generate import Failed, GenerateCall, PrefillCall, Prefilled
from serve_app.wire.tokens import TokenItem
from serve_app.worker.kv_read import Prompt

if TYPE_CHECKING:
    from serve_app.engine.step import StepOutput
    from serve_app.worker.media import Look

# A request that waits for prefill elsewhere is given up if nobody goes on with it: the second call follows at once.
WAIT_S = 10.0


def request_of(call: GenerateCall | PrefillCall, root: bytes) -> Request:
    """What the engine is given for a call; ``root`` is that of its cache keys. Files are put in by who has them."""
    ids = np.frombuffer(call.ids, np.int32).tolist()
    share = call.share if call.priority == "batch" else None
    shared: dict[str, Any] = {"tenant": tenant_id(call.salt), "share": share, "weight": call.weight}
    if isinstance(call, PrefillCall):
        return Request(call.id, ids, len(ids), SamplingParams(), root, prefill_only=True, **shared)
    named = call.adapter.digest if call.adapter is not None else ""
    length = len(ids) - call.resumed
    return Request(
        call.id, ids, length, call.sampling, root, resumed=call.resumed, adapter_digest=named, **shared
    )  # fmt: skip


@dataclass(slots=True)
class Finished:
    """The engine is done with a request: why, how much of the prompt was found stored, and what is told of it.
    ``logprobs``: of the last tokens, where they were asked for.
    """

    reason: str
    cached: int
    prompt_logprobs: PromptLogprobs | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True, eq=False)
class Running:
    """One request in this worker: what to tell its caller at the end, and where its tokens go meanwhile."""

    prompt: Prompt
    done: asyncio.Future[Finished | Failed]
    # As the gateway sent it; None: a prefill.
    call: GenerateCall | None = None
    # Its tokens go to a gateway.
    streamed: bool = False
    cached: int | None = None
    # Tokens that came with the request; and of these, what was stored anywhere then.
    given: int = 0
    found: int = 0
    tokens: int = 0
    # What of them is to be sent together with others.
    kept: TokenItem | None = None
    # How a prefill that goes on elsewhere has ended, once the request waits for one.
    prefilled: asyncio.Future[Prefilled] | None = None
    given_up: asyncio.TimerHandle | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    # Pictures and sounds of its prompt.
    looks: Sequence[Look] = ()
    # For whom this is computed: gateway, tenant's id, class. None: a prefill, which decode counts.
    caller: tuple[str, str, str] | None = None

    @property
    def request(self) -> Request:
        return self.prompt.request

    def failed(self) -> Failed:
        """How it ended before the engine had it: it was aborted."""
        result = self.done.result()
        assert isinstance(result, Failed)
        return result

    def begins(self) -> None:
        """Its first token is there, so its whole prompt has been computed."""
        self.first_token_s = time.perf_counter() - self.started
        for look in self.looks:
            look.read_once()

    def due(self, item: TokenItem, *, first: bool) -> TokenItem | None:
        """What is to be sent now that these tokens are there: the first ones of all at once."""
        assert self.call is not None
        before = self.kept
        if before is not None:
            logprobs = None if item.logprobs is None else (before.logprobs or ()) + item.logprobs
            item = replace(item, offset=before.offset, ids=before.ids + item.ids, logprobs=logprobs)
        waits = not first and item.finish is None and len(item.ids) < self.call.together
        self.kept = item if waits else None
        return None if waits else item


class Requests:
    """By id. A request is here from its registration until it is forgotten, over two calls where its prompt is
    prefilled elsewhere in between. ``abort(id)`` is called for what is forgotten before its end.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._running: dict[str, Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def get(self, request_id: str) -> Running | None:
        return self._running.get(request_id)

    def register(self, request: Request, call: GenerateCall | None, looks: Sequence[Look] = ()) -> Running:
        """Raises ValueError for an id that is here already."""
        if request.id in self._running:
            raise ValueError(f"request {request.id} is here already")
        running = Running(
            Prompt.of(request), asyncio.get_running_loop().create_future(), call, given=len(request.tokens), looks=looks
        )
        self._running[request.id] = running
        return running

    def park(self, running: Running) -> None:
        """The prompt is prefilled elsewhere: the request stays until :meth:`resume`, but not for ever."""
        loop = asyncio.get_running_loop()
        running.prefilled = loop.create_future()
        running.given_up = loop.call_later(WAIT_S, self.forget, running.request.id)

    def resume(self, request_id: str) -> Running | None:
        """A parked request whose second call has come; None if it was given up or never was here."""
        running = self._running.get(request_id)
        if running is None or running.given_up is None:
            return None
        running.given_up.cancel()
        running.given_up = None
        return running

    def end(self, request_id: str, result: Finished | Failed) -> None:
        """Tells whoever waits for the request how it ended. One that is parked has nobody, and goes."""
        running = self._running.get(request_id)
        if running is None or running.done.done():
            return
        running.done.set_result(result)
        if running.prefilled is not None and not running.prefilled.done():
            running.prefilled.set_result(Prefilled(request_id))
        if running.given_up is not None:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Ends what nobody waits for any more: a call may be cancelled without an abort ever arriving."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if running.given_up is not None:
            running.given_up.cancel()
        for look in running.looks:
            look.leave()
        if not running.done.done():
            self._abort(request_id)


def token_item(output: StepOutput, cached: int | None) -> TokenItem:
    """What a step brought for a request, as it is sent."""
    logprobs = None if output.logprobs is None else tuple(output.logprobs)
    return TokenItem(output.request_id, output.offset, tuple(output.token_ids), output.finish_reason, logprobs, cached)
