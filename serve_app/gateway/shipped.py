"""Adapters that a model's record brings along (``lora.public``): in the store, for all accounts, once a gateway is up.

They are found by name like any public adapter; an account's own of the same name comes first.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from serve_app.adapters.config import AdapterRefused, read_config
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import weights_directory
from serve_app.catalog.records import Weights
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, Adapter, AdapterStore, AdapterTaken, blob, digest_of
from serve_app.state.blobs.files import Files
from serve_app.state.errors import Away
from serve_app.state.state import State
from serve_app.tasks.model import ServedModel

log = logging.getLogger("ray.serve")

# Whom they belong to: no account can have this id.
OWNER = "@catalogue"
# Until the store can be reached.
AGAIN_S = 5.0
_MANY = 1 << 30


class Shipped:
    """Their ids are the same in every gateway."""

    def __init__(self, state: State, models: Iterable[ServedModel]) -> None:
        self._state, self._models = state, models
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks through all models; once more where there are others."""
        self.close()
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._task.cancel()

    async def _run(self) -> None:
        for model in self._models:
            lora = model.record.adapters
            for name, path in lora.public.items() if lora is not None else ():
                await self._ship(model, name, path)

    async def _ship(self, model: ServedModel, name: str, path: str) -> None:
        while True:
            try:
                folder = weights_directory(Weights(path=path), model.source, f"lora.public.{name}")
                assert folder is not None
                book = self._state.adapters
                await asyncio.to_thread(put, book.store, self._state.files, model.id, name, folder, time.time())
                book.forget()
                return
            except Away:
                await asyncio.sleep(AGAIN_S)
            except (AdapterTaken, AdapterRefused, CatalogError, OSError) as error:
                log.warning("the adapter %s of %s is not there: %s", name, model.id, error)
                return


def put(store: AdapterStore, files: Files, model: str, name: str, folder: Path, now: float) -> None:
    """Makes what lies in ``folder`` the adapter ``name``; nothing happens where it is that already. Blocks. Raises
    :class:`AdapterTaken` where another model has brought one of this name.
    """
    config, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    named = digest_of(config, weights)
    own_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{OWNER} {model} {name}"))
    found = store.find(OWNER, own_id)
    if found is not None and found.digest == named:
        return
    if found is None:
        found = Adapter(own_id, OWNER, model, name, now, now, f"Comes with {model}.", True)
        with suppress(AdapterTaken):  # by another gateway, or for another model: then there is none of this id
            store.create(found, _MANY)
        found = store.find(OWNER, own_id)
        if found is None:
            raise AdapterTaken(f"another model's record has an adapter {name}; rename one of them")
        if found.digest == named:
            return
    if not found.opened:
        found = store.change(OWNER, own_id, opened=True) or found
    store.hold(named, now)
    files.put(blob(named, CONFIG), config)
    files.put(blob(named, WEIGHTS), weights)
    rank = max(read_config(config).ranks)
    done = replace(
        found, version=found.version + 1, digest=named, rank=rank, size=len(config) + len(weights), opened=False,
        config="", weights="", problem="", modified=now,
    )  # fmt: skip
    store.serve(done)  # False: another gateway was first
