"""Models by hand: what an operator starts, stops, scales and adds while the server runs.

What was said is kept in the store first, so that it holds after a restart and every gateway hears of it; then the
gateway that was asked has Serve do it. Asking again does it again, so that an operator need not know how far a gateway
came that was lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from serve_app.api.errors import AlreadyThere, BadChange, NoSuchObject, NotDone, StoreAway
from serve_app.catalog.canary import read_canary
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import Catalog, bounded, read_sent_record, with_operated
from serve_app.catalog.operated import NO_CANARY, Operated
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.gateway.models import Models
from serve_app.state.callers.audit import Actor
from serve_app.state.state import State
from serve_app.tasks.model import ServedModel

log = logging.getLogger("ray.serve")

Action = Literal["start", "stop", "scale"]
ACTIONS: tuple[Action, ...] = ("start", "stop", "scale")
# The action that :meth:`ByHand.share` is.
SHARE = "canary"
# How long Serve's controller may take for what it is told. While it is lost, a call may wait for ever.
SERVE_S = 20.0
# How often it is looked whether another gateway was told something.
LOOK_S = 0.25
MOST_ADDED = 1000
Source = Path


class Deployer(Protocol):
    """What has Serve start and end models. Its calls block."""

    def deploy(self, record: ModelRecord, profile: Profile, source: Source, *, keep: bool) -> None:
        """``keep``: replicas that run go on."""

    def end(self, model: str) -> None: ...


class ByHand:
    """``account``: whose audit trail tells of changes. ``adopted(new, gone)``: models that have come and gone with a
    change. ``deployer`` is None where there is nobody who could start a model.
    """

    def __init__(
        self,
        state: State,
        models: Models,
        home: Path,
        account: str,
        adopted: Callable[[list[ServedModel], list[ServedModel]], None],
    ) -> None:
        self._state, self._models, self._home, self._account = state, models, home, account
        self._adopted = adopted
        # As they were when this gateway started.
        self._files = dict(models.catalog.entries)
        self._version = 0
        self._changing, self._adopting = asyncio.Lock(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="operate")
        self.deployer: Deployer | None = None
        # Why a model would never be up beside the others; "": it could be.
        self.unfit: Callable[[ModelRecord, Profile, Source], str] = lambda record, profile, source: ""

    async def start(self) -> None:
        await self._adopt()
        self._task = asyncio.ensure_future(self._watch())

    def close(self) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def listed(self) -> list[dict[str, Any]]:
        """Every record, whether or not its model runs, with what can be done about it."""
        catalog, profile = self._models.catalog, self._models.profile
        known = {**catalog.entries, **dict.fromkeys(set(catalog.operated) - set(catalog.entries))}
        return [self._shown(catalog, model, profile) for model in sorted(known)]

    def _shown(self, catalog: Catalog, model: str, profile: str) -> dict[str, Any]:
        said, record, served = catalog.operated.get(model), catalog.get(model), self._models.started.get(model)
        added = said is not None and bool(said.record)
        found: dict[str, Any] = {
            "model": model,
            "task": "" if record is None else record.task,
            "description": "" if record is None else record.description,
            "source": "added" if added else "file",
            "profiles": [] if record is None else list(record.serving),
            "startable": record is not None and profile in record.serving,
            "started": served is not None,
            "by_hand": said is not None and said.running is not None,
            "ready": served is not None and served.ready,
            "state": served.detail.get("state", "waiting") if served is not None else "stopped",
            "problem": catalog.problems.get(model) or _trouble(served),
        }
        chosen = served.profile if served is not None else None
        if chosen is None and record is not None and profile in record.serving:
            chosen = record.serving[profile]
        stages = {} if chosen is None else chosen.stages
        found["stages"] = {
            name: {"min_replicas": stage.min_replicas, "max_replicas": stage.max_replicas}
            for name, stage in stages.items()
        }
        found["canary"] = None
        if (share := catalog.canaries.get(model)) is not None:
            other = self._models.started.get(share.model)
            found["canary"] = {**asdict(share), "ready": other is not None and other.ready}
        return found

    def check(self, text: str) -> ModelRecord:
        """The record that ``text`` is, by the checks of the loader. Raises `BadChange` with its reason."""
        try:
            return read_sent_record(text)
        except CatalogError as error:
            raise BadChange(f"The record is refused: {error.told}", param="record") from None

    async def add(self, text: str, *, check: bool, by: Actor) -> ModelRecord:
        """Adds a record, unless it is only to be checked. Raises `BadChange`, `AlreadyThere`."""
        record = await asyncio.to_thread(self.check, text)
        said = Operated(record.id, text)
        async with self._changing:
            catalog = self._models.catalog
            before = catalog.operated.get(record.id)
            if record.id in self._models.started:
                raise AlreadyThere(f"{record.id} runs. Stop it first, or give the record another id.")
            if before is None and len(catalog.operated) >= MOST_ADDED:
                raise BadChange(f"There are {MOST_ADDED} models by hand already. Remove some.")
            would = await asyncio.to_thread(self._with, said)
            if record.canary is not None and record.id in would.problems:
                raise BadChange(f"The record is refused: {would.problems[record.id]}", param="record")
            if self._models.profile in record.serving:
                # As the start would: whether its weights are where it says.
                try:
                    await asyncio.to_thread(would.startable, record.id, self._models.profile)
                except CatalogError as error:
                    raise BadChange(f"The record is refused: {error.told}", param="record") from None
            if not check:
                await self._say(said, by)
        return record

    async def forget(self, model: str, by: Actor) -> None:
        """Removes a record that was added. Raises `NoSuchObject`, `AlreadyThere` while its model runs."""
        async with self._changing:
            said = self._models.catalog.operated.get(model)
            if said is None or not said.record:
                raise NoSuchObject(f"No record of {model[:120]} was added here; files are removed by hand.")
            if said.running:
                raise AlreadyThere(f"{model} runs. Stop it first.")
            if model in self._files:
                # Else the file's would be taken for started.
                await self._say(Operated(model, running=False), by)
            else:
                await self._state.look(self._state.operated.store.forget, self._account, model, by)
                await self._learn()

    async def act(self, model: str, action: Action, bounds: dict[str, tuple[int, int]], by: Actor) -> None:
        """Starts, stops or scales a model. Raises `NoSuchObject`, `BadChange`."""
        async with self._changing:
            catalog = self._models.catalog
            if model not in catalog:
                raise NoSuchObject(f"There is no model {model[:120]} in the catalogue. Add a record of it first.")
            said = catalog.operated.get(model) or Operated(model)
            served = self._models.started.get(model)
            if action == "stop":
                if served is None and said.running is not False:
                    raise BadChange(f"{model} is not started.", param="model")
                if served is not None:
                    await self._say(replace(said, running=False), by)
                await self._serve(lambda deployer: deployer.end(model))
                return
            if action == "scale":
                if served is None:
                    raise BadChange(f"{model} is not started. Start it first.", param="model")
                said = replace(said, bounds={**said.bounds, **bounds})
            else:
                said = replace(said, running=True)
            record, chosen = await asyncio.to_thread(self._startable, said)
            if served is not None and (next(iter(chosen.stages.values())).min_replicas == 0) != served.scales_to_zero:
                raise BadChange(
                    "Whether a model scales to zero is for its record to say: min_replicas: 0.", param="min_replicas"
                )
            await self._say(said, by)
            source = catalog.source(model)
            await self._serve(lambda deployer: deployer.deploy(record, chosen, source, keep=served is not None))

    async def share(self, model: str, given: dict[str, Any] | None, by: Actor) -> None:
        """Has another model answer a share of the model's requests: ``given`` as `Canary` has it, None to end that.
        Raises `NoSuchObject`, `BadChange`.
        """
        async with self._changing:
            catalog = self._models.catalog
            if model not in catalog:
                raise NoSuchObject(f"There is no model {model[:120]} in the catalogue. Add a record of it first.")
            try:
                canary = NO_CANARY if given is None else read_canary(given)
            except CatalogError as error:
                raise BadChange(f"canary: {error.told}", param="canary") from None
            said = replace(catalog.operated.get(model) or Operated(model), canary=canary)
            would = await asyncio.to_thread(self._with, said)
            if canary.model and model not in would.canaries:
                raise BadChange(would.problems[model], param="canary")
            await self._say(said, by)

    def _startable(self, said: Operated) -> tuple[ModelRecord, Profile]:
        """Raises `BadChange`."""
        catalog, profile = self._with(said), self._models.profile
        try:
            record, chosen = catalog.startable(said.model, profile)  # type: ignore[arg-type]
            chosen = bounded(chosen, said.bounds)
        except CatalogError as error:
            raise BadChange(f"{said.model} cannot be started: {error.told}", param="model") from None
        if reason := self.unfit(record, chosen, catalog.source(said.model)):
            raise BadChange(f"{said.model} cannot be started: {reason}.", param="model")
        return record, chosen

    def _with(self, said: Operated) -> Catalog:
        """The catalogue as it would be."""
        known = {**self._models.catalog.operated, said.model: said}
        return with_operated(self._files, self._home, known)

    async def _serve(self, do: Callable[[Deployer], None]) -> None:
        if self.deployer is None:
            return
        try:
            async with asyncio.timeout(SERVE_S):
                # One after the other, also where nobody waits any more: what was asked first must not come last. One
                # that has not begun is given up with its waiter.
                await asyncio.wrap_future(self._thread.submit(do, self.deployer))
        except Exception as error:
            # It is kept, and holds from the next start on at the latest.
            log.error("Serve did not take what an operator asked", exc_info=error)
            why = (
                f"answer within {SERVE_S:g} s" if isinstance(error, TimeoutError) else f"do it ({type(error).__name__})"
            )
            raise NotDone(f"It is kept, but Serve did not {why}. Ask again.") from None

    async def _say(self, said: Operated, by: Actor) -> None:
        await self._state.look(self._state.operated.store.put, self._account, said, by)
        await self._learn()

    async def _learn(self) -> None:
        with suppress(StoreAway):
            await self._state.look(self._state.operated.fill)
        await self._adopt()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._adopt()
            except Exception as error:  # such as a file of records that is wrong now: the models stay as they are
                log.error("what was said of models by hand is not taken over: %s", error)
                await asyncio.sleep(20 * LOOK_S)

    async def _adopt(self) -> None:
        """Takes over what was said, by whichever gateway; one after another, so that nothing older comes last."""
        async with self._adopting:
            book = self._state.operated
            version, known = book.version, book.known
            if version == self._version:
                return
            if known or self._models.catalog.operated:
                catalog = await asyncio.to_thread(with_operated, self._files, self._home, known)
                before = dict(self._models.started)
                new = self._models.adopt(catalog)
                gone = [model for name, model in before.items() if self._models.started.get(name) is not model]
                self._adopted(new, gone)
            self._version = version


def _trouble(served: ServedModel | None) -> str | None:
    """What Serve says of a model that it could not start."""
    if served is None or served.ready or served.detail.get("state") not in ("deploy_failed", "unhealthy"):
        return None
    return str(served.detail.get("message") or "") or None
