"""What other clusters are told of this one, and the requests that they pass here.

A passed request comes tokenised and by a route of its own, so nothing that a client sends can make one; it is served
here or refused, and never passed on. It is work of the account that the other cluster's key belongs to: that account's
limits hold, and its entry in the ledger is the other cluster's bill. The client is charged where it asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import numpy as np

from serve_app.api.errors import ApiError, ContextTooLong, InvalidInput, ModelLoading
from serve_app.gateway.neighbours.ahead import line_ahead, tokenizer_print
from serve_app.gateway.neighbours.prefixes import Prefixes, chunk_keys, passed_salt
from serve_app.grammar.check import GrammarError, check_grammar
from serve_app.kv.keys import tenant_id
from serve_app.routing.types import RouteRequest
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.wire.message import BadMessage
from serve_app.wire.neighbours import ModelOffer, Offers, PassCall, PassedTokens, read_pass
from serve_app.wire.tokens import TokenItem

if TYPE_CHECKING:
    from serve_app.gateway.core import Gateway

# As clients' are bounded (`serve_app.api.fields.sampling`).
MAX_BIASES, MAX_STOPS, MAX_LOGPROBS = 1024, 16, 20
MAX_GRAMMAR = 1 << 18
# A gateway asks once a second, and another of ours may have answered it meanwhile.
LATELY_S = 10.0
MAX_ASKERS = 256


class PeersOnly(ApiError):
    """Another cluster's route, asked with a key of an account that is none."""

    code, status, type, generic = 10000, 403, "permission_error", True

    def __init__(self, account: str) -> None:
        super().__init__(
            f"Authentication error: account {account[:64]} is no cluster that may pass requests here. The operator "
            "lists those in SERVE_APP_PEERS."
        )


class Receiving:
    """Of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._prefixes = Prefixes()
        self._prints: dict[str, str] = {}
        self._asked: dict[str, dict[str, float]] = {}  # when, by account and gateway

    def check(self, caller: Caller) -> None:
        """Raises :class:`PeersOnly`."""
        if caller.account not in self._gateway.settings.peers:
            raise PeersOnly(caller.account)

    async def offers(self, caller: Caller, asker: str, now: float) -> Offers:
        """What this cluster can serve now, for the cluster behind ``caller``. ``asker``: which of its gateways asks."""
        gateway, askers = self._gateway, self._count(caller.account, asker, now)
        try:
            gateway.runtime.check()
        except ApiError:  # what is used cannot be written down
            return Offers(gateway.tally.gateway, caller.account, askers, {})
        models = {}
        for model in list(gateway.models):
            if gateway.engine.serves(model) and (offer := await self._offer(model, caller.account)) is not None:
                models[model.id] = offer
        return Offers(gateway.tally.gateway, caller.account, askers, models)

    def _count(self, account: str, asker: str, now: float) -> int:
        """The account's gateways that have asked lately."""
        asked = self._asked.get(account, {})
        asked[asker[:64]] = now
        asked = {name: at for name, at in asked.items() if now - at < LATELY_S}
        self._asked[account] = dict(sorted(asked.items(), key=lambda one: -one[1])[:MAX_ASKERS])
        return len(self._asked[account])

    async def _offer(self, model: ServedModel, account: str) -> ModelOffer | None:
        dispatcher = self._gateway.engine.dispatcher(model)
        line = await line_ahead(model, dispatcher, account)
        if line is None:
            return None
        router = dispatcher.policy.router
        cached = self._prefixes.told(account, model.id, router.locality.held)
        known = await self._print(model)
        workers = len(dispatcher.policy.workers.loads)
        return ModelOffer(
            line.wait, line.base, line.token, workers, known, dispatcher.weights, dispatcher.chunk_tokens, cached
        )

    async def _print(self, model: ServedModel) -> str:
        found = self._prints.get(model.id)
        if found is None:
            found = self._prints[model.id] = await asyncio.to_thread(tokenizer_print, model)
        return found

    async def begin(self, caller: Caller, body: bytes) -> tuple[ServedModel, PassCall]:
        """The request in ``body``, checked. Raises `ApiError`."""
        try:
            call = read_pass(body)
        except BadMessage as error:
            raise InvalidInput(f"The body is no request of another cluster: {error}.") from None
        gateway = self._gateway
        model = gateway.models.named(call.model)
        if not gateway.engine.serves(model) or model.id in gateway.backends:
            raise InvalidInput(f"{model.id} is served by no workers here.", param="model")
        if not model.ready:
            raise ModelLoading(model.id, retry_after=2.0)
        if call.tokenizer != await self._print(model):
            raise InvalidInput(f"{model.id} has another tokenizer here.", param="tokenizer")
        _check(model, call)
        if call.sampling.grammar is not None:
            try:
                await asyncio.to_thread(check_grammar, call.sampling.grammar, special_tokens=True)
            except GrammarError as error:
                raise InvalidInput(f"grammar: {error}", param="grammar") from None
        allowance = gateway.state.allowance
        allowance.check_plan(caller, model.id, paid=bool(model.record.properties.require_workers_paid))
        await allowance.request(caller, model.record.task)
        return model, call

    async def tokens(self, model: ServedModel, call: PassCall, caller: Caller) -> AsyncIterator[PassedTokens]:
        """The request's tokens as they come. Its entry is safe before the last of them is given."""
        gateway = self._gateway
        ids = np.frombuffer(call.ids, "<i4").astype(np.int32)
        facts = {"prompt_tokens": len(ids), "max_tokens": call.sampling.max_tokens, "passed_by": call.origin[0]}
        work_of = gateway.runtime.work(
            model,
            caller,
            reject_if_busy=call.reject_if_busy,
            shown=True,
            facts=facts,
            worst={"input_tokens": len(ids), "output_tokens": call.sampling.max_tokens},
        )
        gateway.tally.neighbours.received[caller.account, model.id] += 1
        last: TokenItem | None = None
        async with work_of as work:
            work.salt = passed_salt(caller.account, call.tenant)
            route = self._route(model, call, caller, ids, work.salt)
            items = gateway.engine.tokens(ids, call.sampling, route, work, together=call.together, origin=call.origin)
            async with contextlib.aclosing(items):
                async for item in items:
                    if item.finish is None:
                        yield _told(item)
                    else:
                        last = item
        if last is not None:
            yield _told(last)

    def _route(self, model: ServedModel, call: PassCall, caller: Caller, ids: np.ndarray, salt: bytes) -> RouteRequest:
        dispatcher = self._gateway.engine.dispatcher(model)
        keys = chunk_keys(dispatcher.weights, salt, ids, dispatcher.chunk_tokens)
        self._prefixes.add(caller.account, model.id, keys)
        dispatcher.know(tenant_id(salt).hex(), caller.account)
        now = dispatcher.now()
        return RouteRequest(
            id=secrets.token_hex(8),
            prompt_tokens=len(ids),
            keys=keys,
            max_tokens=call.sampling.max_tokens,
            session=f"{caller.account}\0{call.session}" if call.session else None,
            tenant=caller.account,
            weight=caller.weight,
            priority=caller.priority,
            arrived_at=now,
            deadline=None if call.deadline_s is None else now + call.deadline_s,
            reject_if_busy=call.reject_if_busy,
            zone=self._gateway.engine.zone,
        )


def _told(item: TokenItem) -> PassedTokens:
    return PassedTokens(item.ids, item.finish, item.logprobs, item.cached)


def _check(model: ServedModel, call: PassCall) -> None:
    """What a client's request is held against where it is read; this one was read elsewhere. Raises `ApiError`."""
    sampling, vocab = call.sampling, model.tokenizer.vocab_size
    if not call.ids or len(call.ids) % 4:
        raise InvalidInput("ids are 32-bit numbers, one at least.", param="ids")
    ids = np.frombuffer(call.ids, "<i4")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise InvalidInput(f"ids lie between 0 and {vocab - 1}.", param="ids")
    window = model.context_window
    if window is not None and len(ids) + sampling.max_tokens > window:
        raise ContextTooLong(len(ids), sampling.max_tokens, window)
    biases, stops = sampling.logit_bias or {}, sampling.stop_token_ids
    if not all(0 <= token < vocab for token in (*biases, *stops)) or any(map(math.isnan, biases.values())):
        raise InvalidInput(f"Tokens of logit_bias and stop_token_ids lie between 0 and {vocab - 1}.", param="sampling")
    too_many = len(biases) > MAX_BIASES or len(stops) > MAX_STOPS
    if too_many or not 0 <= (sampling.logprobs or 0) <= MAX_LOGPROBS or sampling.prompt_logprobs is not None:
        raise InvalidInput("More is asked for than clients may ask for.", param="sampling")
    if len(sampling.grammar or "") > MAX_GRAMMAR:
        raise InvalidInput(f"A grammar has at most {MAX_GRAMMAR} characters.", param="grammar")
