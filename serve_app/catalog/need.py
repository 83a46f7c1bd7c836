"""How much memory a worker takes on a CPU, before one has ever been measured: from the bytes of its weights' files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import weights_directory
from serve_app.catalog.records import ModelRecord, Profile, Stage, Weights

# Of a process with torch and its kernels: what it takes at least, and with buffers of a first step.
FLOOR_BYTES, USUAL_BYTES = 96 << 20, 192 << 20
# Chunks on their way to the pool; see `export_bytes` of :mod:`serve_app.worker.spec`.
EXPORT_BYTES = 256 << 20
# Bytes that a byte of a file takes at least once it is loaded: bfloat16 is packed into 12 bits, and rounded weights are
# smaller. And at most: panels beside the file's own pages.
_LEAST = {"int4": 0.28, "int8": 0.5}
_PACKED = 0.75
_MOST = 2.0
# Of a stage's deployments, those whose worker publishes K/V.
_PUBLISHES = ("decode", "prefill")
REMEDY = "raise SERVE_APP_MEMORY_BUDGET, or start fewer models (SERVE_APP_MODELS)"
# Without it answers are the same.
OPTIONAL = ("prefill", "draft")


@dataclass(slots=True, frozen=True)
class Need:
    """``least``: bytes that it surely takes. ``likely``: what to count with; None: its weights are not here yet.
    ``grows``: how much of it comes only with use.
    """

    least: int
    likely: int | None
    grows: int = 0


def estimate(
    weights: list[Weights], home: Path, source: Path, *, cache: int, publishes: bool, quantization: str, ranks: int
) -> Need:
    """Of a worker with all of ``weights``; ``cache``: of each of its ranks."""
    sizes = [file_bytes(each, home, source) for each in weights]
    known = sum(size for size in sizes if size is not None)
    grows = ranks * cache + (EXPORT_BYTES if publishes else 0)
    least = ranks * (FLOOR_BYTES + cache // 8) + int(known * _LEAST.get(quantization, _PACKED))
    likely = ranks * USUAL_BYTES + int(known * _MOST) + grows
    return Need(least, None if None in sizes else max(likely, least), grows)


def of_stage(record: ModelRecord, name: str, stage: Stage, home: Path, source: Path) -> Need:
    """Of one worker of a stage that computes on a CPU."""
    draft = record.draft
    weights = [record.weights]
    if draft is not None and name == "draft":
        weights = [draft.weights]
    elif draft is not None and draft.in_worker and name == "decode":
        weights.append(draft.weights)
    return estimate(
        weights, home, source, cache=stage.kv_cache_bytes or 0, publishes=name in _PUBLISHES,
        quantization=record.quantization, ranks=stage.ranks,
    )  # fmt: skip


def unfit(started: Iterable[tuple[ModelRecord, Profile, Path]], home: Path, budget: int) -> dict[str, str]:
    """Why models can never be up within a budget, by model, as far as the least that their workers take tells it; each
    with its profile and the file of its record.
    """
    kept: dict[str, int] = {}
    others: dict[str, int] = {}
    for record, profile, source in started:
        for name, stage in profile.stages.items():
            if stage.num_gpus or (name in OPTIONAL and not stage.min_replicas):
                continue
            try:
                least = of_stage(record, name, stage, home, source).least
            except CatalogError:  # its worker says so
                continue
            if stage.min_replicas:
                kept[record.id] = kept.get(record.id, 0) + stage.min_replicas * least
            else:
                others[record.id] = max(least, others.get(record.id, 0))
    held = sum(kept.values())
    if held > budget:
        names = f"{', '.join(sorted(kept))}, which never sleep, take at least {said(held)} together"
        return dict.fromkeys(kept, f"{names}, more than the memory budget of {said(budget)}; {REMEDY}")
    beside = f" beside {', '.join(sorted(kept))}, which never sleep" if kept else ""
    return {
        model: f"{model} takes at least {said(least)}, more than the memory budget of {said(budget)} has{beside}; "
        + REMEDY
        for model, least in others.items()
        if least > budget - held
    }


def said(count: int) -> str:
    """Bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def file_bytes(weights: Weights, home: Path, source: Path) -> int | None:
    """Bytes of the safetensors files where they lie on this machine; None if they have not been fetched. Raises
    CatalogError for a directory that is not there.
    """
    if weights.path is not None:
        folder = weights_directory(weights, source)
    elif weights.wheel is not None:
        wheel = weights.wheel
        folder = home / "weights" / f"{wheel.name}-{wheel.version}-{wheel.sha256[:12]}"
        if not folder.is_dir():
            return wheel.size
    else:
        folder = _snapshot(weights)
    if folder is None or not folder.is_dir():
        return None
    # A pipeline of diffusers has its models in folders of their own.
    files = [*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]
    return sum(file.stat().st_size for file in files) or None


def _snapshot(weights: Weights) -> Path | None:
    """Where huggingface_hub keeps a repository, by its documented layout: importing it costs half a second."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{(weights.repo or '').replace('/', '--')}"
    revision = weights.revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    return folder / "snapshots" / commit
