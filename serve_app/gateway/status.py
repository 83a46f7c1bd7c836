"""Counters of every model's workers and queues, as a gateway tells them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import ALL_STATS
from serve_app.wire.replicas import Nothing

if TYPE_CHECKING:
    from serve_app.gateway.core import Gateway

log = logging.getLogger("ray.serve")

TIMEOUT_S = 2.5


async def status(gateway: Gateway, account: str) -> dict[str, Any]:
    """The account of the settings, the operator's, sees all of them, others their own requests: how busy a machine is
    tells of other people's work.
    """
    own = account == gateway.settings.account
    started = list(gateway.models)  # which may change meanwhile
    found = await asyncio.gather(*(_of_model(gateway, each, None if own else account) for each in started))
    models = {model.id: entry for model, entry in zip(started, found, strict=True)}
    if not own:
        return {"models": models}
    prices = {"currency": gateway.prices.currency, "problem": gateway.price_watch.file.problem or None}
    shown = {"streams": len(gateway.inbox), "store": gateway.state.counters(), "prices": prices}
    memory = {"memory": gateway.health.memory.nodes} if gateway.health.memory.budget else {}
    return {"gateway": shown, "runners": await gateway.reports.shown(), **memory, "models": models}


async def _of_model(gateway: Gateway, model: ServedModel, account: str | None) -> dict[str, Any]:
    """Everything, or what is ``account``'s."""
    entry: dict[str, Any] = {"ready": model.ready}
    dispatcher = gateway.engine.dispatcher(model) if gateway.engine.serves(model) else None
    if account is not None:
        return entry | (dispatcher.stats(account) if dispatcher is not None else {})
    entry["inflight"] = model.inflight
    if dispatcher is not None:
        entry["routing"] = dispatcher.stats()
    # Asking a model that has no replica would start one.
    if model.ready and not (model.scales_to_zero and not model.inflight):
        entry |= await _workers(gateway, model)
    return entry


async def _workers(gateway: Gateway, model: ServedModel) -> dict[str, Any]:
    """``workers``: counters, one entry per worker (several decode replicas tell of the same prefill workers);
    ``silent``: stages with a worker that has none to tell, because it is being replaced or held up.
    """
    if gateway.ask_all is None:
        return {"workers": [], "silent": []}
    try:
        told = await asyncio.wait_for(gateway.ask_all(model, ALL_STATS, Nothing()), TIMEOUT_S)
    except Exception as error:  # a replica is being replaced
        log.info("no counters from %s (%s)", model.id, type(error).__name__)
        return {"workers": [], "silent": sorted(model.profile.stages)}
    entries = [worker for counters in told for worker in counters.workers]
    workers = {(w.stage, w.numbers.get("node"), w.pid): w.shown() for w in entries if not w.silent}
    return {"workers": list(workers.values()), "silent": sorted({w.stage for w in entries if w.silent})}
