"""What a worker does between its birth and its first request: weights, model, engine. Imports torch, so workers
only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.engine.build import EngineLimits, build_engine, gpu_cache_bytes
from serve_app.engine.constrain import Masks
from serve_app.engine.engine import Engine
from serve_app.engine.kv_io.transfer import ChunkExporter
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.forced import ForcedProposer
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.proposer import Proposer
from serve_app.engine.speculation.recent import RecentProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.grammar.matcher import Grammars
from serve_app.kv.chunk import Layout
from serve_app.kv.keys import root_key, weights_key
from serve_app.models.encoding import device_bytes
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.models.loading.bare import publish
from serve_app.models.loading.folder import UnsupportedModel, fingerprint
from serve_app.parallel.experts import folder_of
from serve_app.parallel.group import Group
from serve_app.worker.draft_link import DraftLink
from serve_app.worker.drafting import make_drafter
from serve_app.worker.kv_publish import Publisher
from serve_app.worker.media import MediaWork, works
from serve_app.worker.rank_store import shared_by
from serve_app.worker.ranks import Ranks, load_together, refuse_features

if TYPE_CHECKING:
    from serve_app.worker.spec import WorkerSpec

Progress = Callable[[str], None]
# Beside a GPU the processors have time for masks; on a CPU the forward pass wants them all.
MASK_THREADS = 4


def prepare_torch(spec: WorkerSpec) -> None:
    import torch

    if spec.cpu_threads:
        torch.set_num_threads(spec.cpu_threads)
    torch.set_grad_enabled(False)
    # Chunks are read-only views into the object store, and nothing writes to them.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def resolve_weights(spec: WorkerSpec, progress: Progress, weights: dict[str, Any] | None = None) -> Path:
    """The model's directory on this node (or that of other ``weights``), fetched first if need be."""
    from serve_app.catalog.records import Weights
    from serve_app.catalog.weights import resolve

    def fetching(name: str, done: int, total: int) -> None:
        progress(f"fetching {name}" + (f" {100 * done // total} %" if total else ""))

    return resolve(Weights.model_validate(weights or spec.weights), Path(spec.home), fetching, spec.source)


def load_model(spec: WorkerSpec, path: Path, progress: Progress, group: Group | None = None) -> CausalModel:
    """The model in ``path``, on the worker's device; with ``group`` this rank's part of it."""
    model = load_causal_lm(
        path,
        dtype=spec.dtype,
        device=spec.device,
        max_model_len=spec.max_model_len or None,
        quantization=spec.quantization,
        kv_cache_dtype=spec.kv_cache_dtype,
        adapters=spec.adapters,
        group=group,
        counts=folder_of(spec.home, spec.model) if spec.expert_copies else None,
        progress=progress,
    )
    if spec.adapters and (group is None or not group.place.rank):
        # Gateways of this node check adapters by it; they would find it out by themselves, in seconds.
        publish(path, Path(spec.home))
    return model


def limits_of(spec: WorkerSpec, model: CausalModel, path: Path | None = None) -> EngineLimits:
    """What the catalogue allows the worker; without a size the cache takes what the worker's share of a GPU leaves.
    ``path``: of a model that pictures and sounds are encoded with.
    """
    length = spec.max_model_len or model.max_model_len
    limits = EngineLimits(spec.kv_cache_bytes, spec.max_batch_tokens, spec.max_num_seqs, length)
    limits.itl_s, limits.graphs = spec.itl_s, spec.cuda_graphs
    if spec.ranks > 1:
        # Rank 0 tells the others of each step as it comes.
        limits.overlap = False
    if not limits.kv_cache_bytes and model.device.type == "cuda":
        if spec.ranks > 1:
            raise UnsupportedModel(
                f"a {spec.stage} worker of {spec.ranks} ranks does not measure its cache yet; give kv_cache_bytes, "
                "which is each rank's (`serve-app plan` tells how much there is)"
            )
        media = device_bytes(path, model.module, model.max_model_len) if path and model.encoders else 0
        limits.kv_cache_bytes = gpu_cache_bytes(model, limits, spec.gpu_share, media)
    return limits


@dataclass(slots=True)
class Loaded:
    """An engine with the stage's features plugged in. ``publisher`` gets what it exports; ``weights``: as
    :func:`serve_app.kv.keys.weights_key` names them; ``media``: by what the model reads beside text.
    """

    model: CausalModel
    engine: Engine
    publisher: Publisher
    weights: bytes
    ranks: Ranks | None = None
    media: dict[str, MediaWork] = field(default_factory=dict)

    def root_of(self, salt: bytes, adapter: str) -> bytes:
        """The root of a tenant's cache keys, with an adapter's digest ("": none)."""
        return root_key(self.weights, adapter, salt)


def load_engine(
    spec: WorkerSpec,
    progress: Progress,
    *,
    publish: Callable[[Layout, Layout | None], Publisher],
    draft: DraftLink,
    begin: Callable[[], Ranks] | None = None,
) -> Loaded:
    """``publish`` makes the publisher for chunks of a layout, and of that of states; ``begin`` starts the other ranks
    of a worker that has several.
    """
    prepare_torch(spec)
    ranks: Ranks | None = None
    if spec.ranks > 1:
        refuse_features(spec)
        if begin is None:
            raise ValueError(f"nobody starts the {spec.ranks} ranks of this worker")
        ranks = begin()
    path = resolve_weights(spec, progress)
    if ranks is None:
        model = load_model(spec, path, progress)
    else:
        group = ranks.group
        model = load_together(ranks, lambda: load_model(spec, path, progress, group))
    folder = resolve_weights(spec, progress, spec.draft_weights) if spec.draft_weights else None
    if folder is not None:
        progress("loading draft")
    drafter = make_drafter(spec, model, folder, draft)
    progress("allocating cache")
    publisher = publish(model.kv_shape.layout, model.kv_shape.state_layout)

    def plug_in(engine: Engine) -> None:
        if spec.publish and model.kv_shape.layers:
            kv, slot_of = engine.runner.kv, engine.scheduler.states.slot_of
            engine.exporter = ChunkExporter(kv, publisher.emit, slot_of, publisher.admit)
            publisher.shared = shared_by(engine.runner.kv)
        drafting = drafter.plug_in(engine) if drafter is not None else None
        if proposers := _proposers(spec, drafting):
            controller = VerifyEverything if spec.always_draft else SpeculationController
            engine.speculation = Speculation(proposers, controller(spec.speculate_tokens), vocab_size=model.vocab_size)
        # Prefill workers as well: a request may be generated where it was prefilled, and its grammar holds there too.
        threads = 1 if model.device.type == "cpu" else MASK_THREADS
        engine.runner.masks = Masks(Grammars(path, model.vocab_size, model.eos_token_ids, threads=threads))

    limits = limits_of(spec, model, path)
    limits.reserved_blocks = drafter.reserved_blocks if drafter is not None else 0
    engine = build_engine(model, limits, plug_in)
    progress(f"warming up, cache of {model.report['kv_cache_tokens']} tokens")
    warm_up(engine)

    revision = f"{spec.model} {fingerprint(path)} {spec.quantization}"
    if drafter is not None and drafter.weights is not None:
        revision += f" {fingerprint(drafter.weights)}"

    weights = weights_key(revision, model.kv_shape.dtype_name, model.kv_shape.layout.name)
    return Loaded(
        model,
        engine,
        publisher,
        weights,
        ranks,
        works(model.encoders, path, engine.scheduler.max_model_len),
    )


def _proposers(spec: WorkerSpec, drafting: Proposer | None) -> list[Proposer]:
    """Cheapest first; none for a worker that does not speculate."""
    found: list[Proposer] = []
    if not spec.speculate_tokens:
        return found
    found.append(ForcedProposer())
    if spec.ngram:
        found.append(NgramProposer())
    if spec.recent:
        found.append(RecentProposer())
    if drafting is not None and spec.draft_tokens:
        found.append(drafting)
    return found


def warm_up(engine: Engine) -> None:
    """One short request, so that the first real one does not pay for lazy initialisation."""
    from serve_app.engine.request import Request
    from serve_app.sampling_params import SamplingParams

    speculation, engine.speculation = engine.speculation, None
    engine.add(Request("warm-up", [1, 2, 3, 4, 5], 5, SamplingParams(max_tokens=2, ignore_eos=True), b"warm-up"))
    while engine.has_work:
        engine.step()
    engine.scheduler.forget_cache()
    engine.speculation = speculation
