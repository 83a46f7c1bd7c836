"""Asks every text worker for its load, again and again: workers come and go, and nobody tells a gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.channel.inbox import TokenInbox
from serve_app.gateway.models import Models, ServedModel

log = logging.getLogger("ray.serve")

LEASE_S = 15.0
# A worker that has just come up is found this soon; three renewals may fail before a lease ends.
PERIOD_S = 4.0
# While a model has replicas that have not been asked yet.
EAGER_S = 0.5
TIMEOUT_S = 5.0
STAGES = ("decode", "prefill")

AskAll = Callable[[ServedModel, str, dict[str, Any], str], Awaitable[list[Any]]]


class Subscriptions:
    """``ask_all(model, "subscribe", wire, stage)`` reaches every replica of a stage."""

    def __init__(self, models: Models, inbox: TokenInbox, ask_all: AskAll) -> None:
        self._models = models
        self._inbox = inbox
        self._ask_all = ask_all
        self._reached: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            wanted = [(m, stage) for m in self._models for stage in STAGES if m.ready and stage in m.profile.stages]
            await asyncio.gather(*(self._subscribe(model, stage) for model, stage in wanted))
            missing = any(
                (m.id, stage) not in self._reached and (m.inflight or not m.scales_to_zero) for m, stage in wanted
            )
            unready = any(not m.ready for m in self._models if m.record.task == "text-generation")
            await asyncio.sleep(EAGER_S if missing or unready else PERIOD_S)

    async def _subscribe(self, model: ServedModel, stage: str) -> None:
        wire = {"inbox": self._inbox.address.to_wire(), "lease_s": LEASE_S}
        try:
            await asyncio.wait_for(self._ask_all(model, "subscribe", wire, stage), TIMEOUT_S)
            self._reached.add((model.id, stage))
        except Exception as error:  # no replica, or one that is going; the next round asks again
            self._reached.discard((model.id, stage))
            log.debug("no load reports from %s %s for now (%s)", model.id, stage, type(error).__name__)
