"""Adapters in a gateway: made, filled and checked for their owners, and looked up for requests."""

from __future__ import annotations

import asyncio
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, ParamSpec, TypeVar

from serve_app.adapters.check import check_weights
from serve_app.adapters.config import MAX_BYTES, AdapterConfig, AdapterRefused, read_config
from serve_app.adapters.shapes import Base, NoShapes, base_of
from serve_app.api import identity
from serve_app.api.adapter_errors import AdapterIncomplete, AdapterNameTaken, BadAdapter, NoAdapter
from serve_app.api.errors import LoraUnsupported, StoreAway
from serve_app.api.fields.lora import NAME
from serve_app.api.types import AdapterRef
from serve_app.catalog.records import Lora
from serve_app.catalog.weights import tokenizer_directory
from serve_app.gateway.models import Models
from serve_app.state.blobs.adapters import (
    CONFIG,
    WEIGHTS,
    Adapter,
    AdapterError,
    AdapterTaken,
    Order,
    blob,
    content_digest,
)
from serve_app.state.blobs.files import CHUNK, NoFile
from serve_app.state.callers.accounts import Caller
from serve_app.state.errors import Away
from serve_app.state.reader import plausible
from serve_app.state.state import State
from serve_app.tasks.model import ServedModel

# Uploads hold a thread as long as their clients send.
THREADS = 16
MAX_DESCRIPTION = 1000
_NAME = re.compile(NAME, re.ASCII)
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True, frozen=True)
class Bounds:
    """``most``: adapters of an account. ``file_bytes``: of a file of weights."""

    most: int = 100
    file_bytes: int = 300_000_000


class Adapters:
    """All methods raise `StoreAway`."""

    def __init__(self, state: State, models: Models, home: Path, bounds: Bounds) -> None:
        self._state = state
        self._store = state.adapters.store
        self._models = models
        self._home = home
        self.bounds = bounds
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")
        # A check takes a processor for as long as it takes.
        self._checking = asyncio.Lock()
        self._describing: dict[str, asyncio.Task[Base]] = {}

    async def aside(self, do: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """``do`` off the event loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, partial(do, *args, **kwargs))
        except Away as error:
            raise StoreAway from error
        except AdapterTaken as error:
            raise AdapterNameTaken(str(error), param="name") from None
        except AdapterError as error:
            raise BadAdapter(str(error)) from None

    # -- for requests

    async def choose(self, model: ServedModel, caller: Caller, which: str) -> AdapterRef:
        """The adapter of this id or name, in the version that is served now; a request that is run again, or that
        belongs to a batch, goes on with the one that it began with. One of a batch needs it to be there still.
        """
        self._serves(model)
        if (before := identity.kept(f"lora {which}")) is not None:
            adapter_id, digest, size = before.split()
            if identity.batch() and await self._state.adapters.find(caller.account, adapter_id) is None:
                raise _missing(which)
            return AdapterRef(adapter_id, digest, int(size))
        found = await self._state.adapters.find(caller.account, which) if plausible(which) else None
        chosen = _usable(found, model, which)
        identity.keep(f"lora {which}", _written(chosen))
        return chosen

    def kept(self, model: ServedModel, caller: Caller, which: str) -> dict[str, str]:
        """:meth:`choose` for requests that run later. Blocks; raises `Away` beside what the client should see."""
        self._serves(model)
        found = self._store.find(caller.account, which) if plausible(which) else None
        return {f"lora {which}": _written(_usable(found, model, which))}

    # -- for owners

    async def create(self, account: str, model_name: str, name: str, description: str, public: bool) -> Adapter:
        model = self._models.named(model_name)
        self._serves(model)
        if not _NAME.fullmatch(name) or _is_uuid(name):
            raise BadAdapter(
                f"{name[:100]!r} is no name of a fine-tune. Use 1 to 100 letters, digits and . _ -, beginning with a "
                "letter or a digit, and no UUID.",
                param="name",
            )
        now = time.time()
        made = Adapter(str(uuid.uuid4()), account, model.id, name, now, now, description, public)
        await self.aside(self._store.create, made, self.bounds.most)
        self._begin_describing(model)
        return made

    async def own(self, account: str, which: str) -> Adapter:
        """By id or name. Raises `NoAdapter` for others' as well, public ones included."""
        found = await self.aside(self._store.find, account, which) if plausible(which) else None
        if found is None or found.account != account:
            raise _missing(which)
        return found

    async def seen(self, account: str, which: str) -> Adapter:
        """The account's own, or a public one."""
        found = await self.aside(self._store.find, account, which) if plausible(which) else None
        if found is None:
            raise _missing(which)
        return found

    async def listed(self, account: str) -> list[Adapter]:
        return await self.aside(self._store.own, account)

    async def public(self, limit: int, offset: int, order: Order) -> list[Adapter]:
        return await self.aside(self._store.public, limit, offset, order)

    async def open_version(self, adapter: Adapter) -> Adapter:
        """Files may be uploaded again; what is served stays until both are there and checked."""
        if adapter.opened:
            return adapter
        return await self._change(adapter, opened=True, config="", weights="", problem="")

    async def describe(self, adapter: Adapter, description: str | None, public: bool | None) -> Adapter:
        given = {"description": description, "public": public}
        changed = {name: value for name, value in given.items() if value is not None}
        done = await self._change(adapter, modified=time.time(), **changed)
        self._state.adapters.forget()
        return done

    async def remove(self, adapter: Adapter) -> None:
        """Requests under way go on. Raises `NoAdapter` where somebody else was first."""
        if not await self.aside(self._store.remove, adapter.account, adapter.id, time.time()):
            raise _missing(adapter.id)
        self._state.adapters.forget()
        if adapter.weights:
            await self.aside(self._state.files.delete, adapter.weights)

    async def take_config(self, adapter: Adapter, data: bytes) -> Adapter:
        """The configuration of the version that is uploaded. Raises `BadAdapter`."""
        self._check_open(adapter)
        model = self._models.named(adapter.model)
        try:
            text = data.decode()
            await self._check_base(await self.aside(read_config, data), model)
        except (AdapterRefused, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, AdapterRefused) else f"{CONFIG} is not UTF-8; save it again"
            raise BadAdapter(f"{_sentence(why)}", param="file") from None
        self._begin_describing(model)
        adapter = await self._change(adapter, config=text, problem="", modified=time.time())
        if not adapter.weights:
            return adapter
        with TemporaryFile() as file:
            try:
                await self.aside(spool, self._state.files.stream(adapter.weights), file)
            except NoFile:
                return await self._change(adapter, weights="")
            done = await self._finish(adapter, file)
            await self.aside(self._state.files.delete, adapter.weights)
            return done

    async def take_weights(self, adapter: Adapter, file: BinaryIO) -> Adapter:
        """The weights of the version that is uploaded. Raises `BadAdapter`."""
        self._check_open(adapter)
        # The configuration may have come since the request began.
        adapter = await self.own(adapter.account, adapter.id)
        if adapter.config:
            return await self._finish(adapter, file)
        name = f"waiting-{adapter.id}"
        kept = blob(name, WEIGHTS)
        await self.aside(self._store.hold, name, time.time())
        await self.aside(self._state.files.put, kept, _pieces(file))
        adapter = await self._change(adapter, weights=kept, problem="", modified=time.time())
        return await self.take_config(adapter, adapter.config.encode()) if adapter.config else adapter

    def _check_open(self, adapter: Adapter) -> None:
        if not adapter.opened:
            raise BadAdapter(
                f"Version {adapter.version} of the fine-tune {adapter.name} is complete, and its files do not change. "
                f"Open a new version first: POST .../finetunes/{adapter.name}/versions.",
                param="file_name",
            )

    async def _finish(self, adapter: Adapter, file: BinaryIO) -> Adapter:
        """Both files are there: checks them, stores them, serves them."""
        model = self._models.named(adapter.model)
        serves = self._serves(model)
        config = adapter.config.encode()
        try:
            base = await self._base(model)
            async with self._checking:
                read = await self.aside(read_config, config)
                checked = partial(check_weights, max_rank=serves.max_rank)
                rank = await self.aside(checked, read, file, base)
        except AdapterRefused as error:
            await self._change(adapter, weights="", problem=str(error), modified=time.time())
            raise BadAdapter(_sentence(str(error)), param="file") from None
        digest, size = await self.aside(self._keep, config, file)
        done = replace(
            adapter,
            version=adapter.version + 1,
            digest=digest,
            rank=rank,
            size=size,
            opened=False,
            config="",
            weights="",
            problem="",
            modified=time.time(),
        )
        if not await self.aside(self._store.serve, done):
            raise NoAdapter(f"The fine-tune {adapter.name} was removed or changed meanwhile.", param="finetune")
        self._state.adapters.forget()
        return done

    def _keep(self, config: bytes, file: BinaryIO) -> tuple[str, int]:
        """Writes both files where workers find them; the digest that names them, and the bytes of both."""
        size = file.seek(0, os.SEEK_END)
        digest = content_digest(config, size)
        for piece in _pieces(file):
            digest.update(piece)
        name, files = digest.hexdigest(), self._state.files
        # From here on nobody deletes what is there.
        self._store.hold(name, time.time())
        files.put(blob(name, CONFIG), config)
        files.put(blob(name, WEIGHTS), _pieces(file))
        return name, len(config) + size

    async def _check_base(self, config: AdapterConfig, model: ServedModel) -> None:
        """Refuses an adapter of another model of ours, and one of another kind of model."""
        rank, most = max(config.ranks), self._serves(model).max_rank
        if rank > most:
            raise AdapterRefused(
                f"adapter_config.json has rank {rank}; {model.id} serves ranks up to {most}: train with a smaller r"
            )
        named = config.base.lower()
        for other in self._models.catalog:
            own = model.record.weights.repo or ""
            repo = (other.weights.repo or "").lower()
            if named and repo == named and own.lower() != named:
                raise AdapterRefused(
                    f"adapter_config.json says base_model_name_or_path {config.base}, which is {other.id} here, and "
                    f"the fine-tune is for {model.id}: create it for {other.id}"
                )
        if config.kind and (kind := (await self._base(model)).kind) and config.kind != kind:
            raise AdapterRefused(
                f"adapter_config.json says model_type {config.kind}, and {model.id} is of type {kind}: create the "
                "fine-tune for its own base model"
            )

    def _serves(self, model: ServedModel) -> Lora:
        """Raises `LoraUnsupported`."""
        if model.record.adapters is None:
            raise LoraUnsupported(model.id)
        return model.record.adapters

    async def _base(self, model: ServedModel) -> Base:
        try:
            return await asyncio.shield(self._begin_describing(model))
        except NoShapes as error:
            raise BadAdapter(f"Adapters of {model.id} cannot be checked here: {error}.") from None

    def _begin_describing(self, model: ServedModel) -> asyncio.Task[Base]:
        """Finds the base model's modules; begun when an adapter is created, it is done when its files come."""
        known = self._describing.get(model.id)
        if known is None or (known.done() and known.exception() is not None):

            def describe() -> Base:
                return base_of(tokenizer_directory(model.record.weights, model.home, model.source), self._home)

            known = self._describing[model.id] = asyncio.create_task(self.aside(describe))
            known.add_done_callback(lambda done: done.cancelled() or done.exception())
        return known

    async def _change(self, adapter: Adapter, **fields: object) -> Adapter:
        changed = await self.aside(partial(self._store.change, adapter.account, adapter.id, **fields))
        if changed is None:
            raise _missing(adapter.id)
        return changed

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def read_small(pieces: Iterator[bytes]) -> bytes:
    """A configuration that comes in ``pieces``. Raises `BadAdapter` for a long one."""
    data = b""
    for piece in pieces:
        data += piece
        if len(data) > MAX_BYTES:
            raise BadAdapter(f"{CONFIG} has more than {MAX_BYTES} bytes. Shorten it.", param="file")
    return data


def spool(pieces: Iterator[bytes], file: BinaryIO) -> None:
    for piece in pieces:
        file.write(piece)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(CHUNK):
        yield piece


def _usable(found: Adapter | None, model: ServedModel, which: str) -> AdapterRef:
    """What was ``found`` for requests of a model. Raises what the client should see."""
    if found is None:
        raise _missing(which)
    if not found.digest:
        raise AdapterIncomplete(_waiting(found), param="lora")
    if found.model != model.id:
        raise NoAdapter(f"The fine-tune {which} is for the model {found.model}, not for {model.id}.")
    return AdapterRef(found.id, found.digest, found.size)


def _written(chosen: AdapterRef) -> str:
    """As `identity.keep` takes it."""
    return f"{chosen.id} {chosen.digest} {chosen.size}"


def _missing(which: str) -> NoAdapter:
    return NoAdapter(
        f"Finetune not found: there is no {which[:120]!r} in this account, and no public one. "
        "GET /ai/finetunes lists the account's."
    )


def _waiting(adapter: Adapter) -> str:
    if adapter.problem:
        return f"The files of the fine-tune {adapter.name} were refused: {adapter.problem}. Upload them again."
    listed = " and ".join(adapter.missing)
    where = f"POST .../finetunes/{adapter.name}/finetune-assets"
    return f"The fine-tune {adapter.name} lacks its {listed}. Upload it: {where}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _is_uuid(name: str) -> bool:
    try:
        uuid.UUID(name)
    except ValueError:
        return False
    return True
