"""What a worker does between its birth and its first request: weights, model, engine. Imports torch, so workers only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.engine import Engine
from serve_app.engine.speculate import DraftProposer, DraftQuery, Speculation, SpeculationController
from serve_app.engine.transfer import ChunkExporter
from serve_app.kv.keys import root_key
from serve_app.models.load import CausalModel, load_causal_lm

if TYPE_CHECKING:
    from deployments.spec import WorkerSpec

Progress = Callable[[str], None]


def prepare_torch(spec: WorkerSpec) -> None:
    import torch

    if spec.cpu_threads:
        torch.set_num_threads(spec.cpu_threads)
    torch.set_grad_enabled(False)


def resolve_weights(spec: WorkerSpec, progress: Progress) -> Path:
    """The model's directory on this node, fetched first if need be."""
    from serve_app.catalog.records import Weights
    from serve_app.catalog.weights import resolve

    def fetching(name: str, done: int, total: int) -> None:
        progress(f"fetching {name}" + (f" {100 * done // total} %" if total else ""))

    return resolve(Weights.model_validate(spec.weights), Path(spec.home), fetching, spec.source)


def load_model(spec: WorkerSpec, progress: Progress) -> CausalModel:
    prepare_torch(spec)
    path = resolve_weights(spec, progress)
    return load_causal_lm(
        path, dtype=spec.dtype, device=spec.device, max_model_len=spec.max_model_len, progress=progress
    )


def load_engine(
    spec: WorkerSpec,
    progress: Progress,
    *,
    emit: Callable[[str, Any, Any], None],
    draft: Callable[[list[DraftQuery], int], dict[str, list[int] | None]],
) -> tuple[CausalModel, Engine, Callable[[bytes], bytes]]:
    """The model, an engine with the stage's features plugged in, and the function from tenant salt to cache root."""
    model = load_model(spec, progress)
    progress("allocating cache")
    dtype_name = str(model.kv_shape.dtype).removeprefix("torch.")

    def plug_in(engine: Engine) -> None:
        if spec.publish:
            engine.exporter = ChunkExporter(engine.runner.kv, dtype_name, emit)
        if spec.draft_tokens:
            controller = SpeculationController(spec.draft_tokens, always=spec.always_draft)
            engine.speculation = Speculation(DraftProposer(draft), controller)

    limits = EngineLimits(spec.kv_cache_bytes, spec.max_batch_tokens, spec.max_num_seqs, spec.max_model_len)
    engine = build_engine(model, limits, plug_in)
    progress("warming up")
    warm_up(engine)

    def root_of(salt: bytes) -> bytes:
        return root_key(spec.revision, dtype_name, model.kv_shape.layout, "", salt)

    return model, engine, root_of


def warm_up(engine: Engine) -> None:
    """One short request, so that the first real one does not pay for lazy initialisation."""
    from serve_app.engine.request import Request, SamplingParams

    speculation, engine.speculation = engine.speculation, None
    engine.add(Request("warm-up", [1, 2, 3, 4, 5], 5, SamplingParams(max_tokens=2, ignore_eos=True), b"warm-up"))
    while engine.has_work:
        engine.step()
    engine.scheduler.blocks.clear_cache()
    engine.speculation = speculation
