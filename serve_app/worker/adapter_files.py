"""Brings an adapter from the file store into the form that a model takes. All of it blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.adapters.config import AdapterRefused
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, blob, digest_of
from serve_app.state.blobs.files import Files, NoFile, open_files
from serve_app.wire.generate import AdapterAt
from serve_app.worker.adapters import Adapters
from serve_app.worker.packed_files import PackedFiles

if TYPE_CHECKING:
    from serve_app.engine.loop import EngineLoop
    from serve_app.models.adapters import AdapterBank, Prepared
    from serve_app.worker.spec import WorkerSpec

# Bytes of packed adapters on the node's disk, of those in memory.
PACKED_TIMES = 16


def open_adapters(
    spec: WorkerSpec, bank: AdapterBank | None, engine_loop: EngineLoop, lost: Callable[[str, str], None]
) -> Adapters | None:
    """Those of a model with places for adapters; None for any other."""
    if bank is None:
        return None
    packed = None
    if bank.form:
        folder = Path(spec.home) / "adapters" / "packed" / bank.form
        packed = PackedFiles(folder, bank, PACKED_TIMES * spec.adapter_cache_bytes)
    load = partial(load_adapter, open_files(spec.files), bank, packed)
    between_steps = partial(_between_steps, engine_loop)
    return Adapters(bank, load, between_steps, lost, cache_bytes=spec.adapter_cache_bytes)


def _between_steps(engine_loop: EngineLoop, function: Callable[[], None]) -> Future[None]:
    return engine_loop.call(lambda engine: function())


def load_adapter(files: Files, bank: AdapterBank, packed: PackedFiles | None, at: AdapterAt) -> Prepared:
    """The adapter as ``bank`` takes it, from ``packed`` if it is there. Raises :class:`AdapterRefused` where its
    files are gone, damaged, or of another model, and OSError where the file store is out of reach.
    """
    if packed is not None and (found := packed.read(at.digest)) is not None:
        return found
    try:
        config = files.get(blob(at.digest, CONFIG))
        weights = files.get(blob(at.digest, WEIGHTS))
    except NoFile:
        raise AdapterRefused("its files are gone; upload the adapter again") from None
    if digest_of(config, weights) != at.digest:
        raise AdapterRefused("its files are damaged; upload the adapter again")
    prepared = bank.read(config, weights)
    if packed is not None:
        packed.keep(at.digest, prepared)
    return prepared
