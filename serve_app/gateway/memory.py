"""What the memory brokers of all nodes tell: how the models' workers share their memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_app.catalog.need import unfit
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.gateway.models import Models

log = logging.getLogger("ray.serve")

PERIOD_S = 1.0
TIMEOUT_S = 2.5
# Of a model's workers the one that stands farthest in front says how the model does.
_ORDER = ("never", "waiting", "starting", "close", "leave", "up", "asleep")


class MemoryWatch:
    """``ask`` asks the brokers; None where there is no budget. ``unfit``: why models can never be up, by model, as far
    as it is known before they are started. ``nodes``: what brokers have told last
    (:meth:`deployments.memory_broker.MemoryBroker.shown`).
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._looked_for: list[Any] = []
        self.ask: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
        self.budget = 0
        self.unfit: dict[str, str] = {}
        self.nodes: list[dict[str, Any]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.ask is not None and self._task is None:
            self._task = asyncio.ensure_future(self._look_always(self.ask))

    def close(self) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._task.cancel()

    def of(self, model: str) -> dict[str, Any]:
        """Bytes that the model's workers hold and may take, in what state it is, and why; {} without a budget."""
        workers = list(self._workers(model))
        if not workers:
            why = self.unfit.get(model, "")
            return {"state": "never", "why": why} if why else {}
        first = min(workers, key=lambda worker: _ORDER.index(worker["state"]))
        found: dict[str, Any] = {
            "state": first["state"],
            "held_bytes": sum(worker["held_bytes"] for worker in workers),
            "needs_bytes": sum(worker["needs_bytes"] for worker in workers),
        }
        if first["why"]:
            found |= {"why": first["why"], "waited_s": first["waited_s"]}
        return found

    def would(self, record: ModelRecord, profile: Profile, source: Path) -> str:
        """Why a model would never be up beside those that are started, "" if it could be. Blocks."""
        others = [(m.record, m.profile, m.source) for m in self._models if m.id != record.id]
        home = next((m.home for m in self._models), Path())
        return unfit([*others, (record, profile, source)], home, self.budget).get(record.id, "") if self.budget else ""

    def total(self) -> dict[str, int]:
        """Of all nodes that have had a worker; {} without a budget."""
        if not self.budget:
            return {}
        found = {name: sum(node[name] for node in self.nodes) for name in ("held_bytes", "reserved_bytes")}
        return {"budget_bytes": self.budget, **found}

    def waiting(self, model: str, otherwise: Callable[[], str]) -> str:
        """What a request of the model waits for, in words: room, or what ``otherwise`` says."""
        for worker in self._workers(model):
            if worker["state"] == "waiting":
                return str(worker["why"])
        return otherwise()

    def _workers(self, model: str) -> Iterator[dict[str, Any]]:
        return (worker for node in self.nodes for worker in node["workers"] if worker["model"] == model)

    async def _look_always(self, ask: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
        while True:
            if self._looked_for != (started := list(self._models)):
                told = [(model.record, model.profile, model.source) for model in started]
                home = started[0].home if started else Path()
                self.unfit = await asyncio.to_thread(unfit, told, home, self.budget)
                self._looked_for = started
            try:
                self.nodes = await asyncio.wait_for(ask(), TIMEOUT_S)
            except Exception as error:  # one is being started again
                log.debug("the memory brokers do not answer (%s)", type(error).__name__)
            await asyncio.sleep(PERIOD_S)
