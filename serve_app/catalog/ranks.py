"""Whether a record's workers of several processes can be started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.records import ModelRecord, Profile, ProfileName, Stage

# Stages whose workers are engines.
ENGINES = ("decode", "prefill")


def check_ranks(record: ModelRecord, profile_name: ProfileName, source: Path) -> None:
    """Raises CatalogError for what workers of several ranks can't do yet."""
    for name, stage in record.serving[profile_name].stages.items():
        place = f"serving.{profile_name}.{name}"
        if stage.expert_parallel not in (1, stage.tensor_parallel):
            raise CatalogError(
                source,
                f"{place}.expert_parallel",
                f"whole experts lie on the ranks that divide a layer, which are {stage.tensor_parallel} and not "
                f"{stage.expert_parallel}",
                "Give tensor_parallel the same number, or leave expert_parallel out: then ranks divide every expert.",
            )
        asked = {"expert_dispatch": stage.expert_dispatch != "auto", "expert_copies": stage.expert_copies > 0}
        if stage.expert_parallel == 1 and (wrong := [key for key, wanted in asked.items() if wanted]):
            raise CatalogError(
                source,
                f"{place}.{wrong[0]}",
                "it is for ranks that hold whole experts",
                f"Set expert_parallel, or leave {wrong[0]} out.",
            )
        if stage.ranks == 1:
            continue
        if reason := _obstacle(record, name, stage):
            remedy = "Remove it, or tensor_parallel and pipeline_parallel."
            raise CatalogError(source, place, f"a worker of {stage.ranks} ranks has no {reason} yet", remedy)
        if stage.num_gpus not in (0, 1):
            raise CatalogError(
                source,
                f"{place}.num_gpus",
                f"each of the {stage.ranks} ranks of a worker has one GPU or none, and not {stage.num_gpus:g}",
                "Write num_gpus: 1; it is each rank's.",
            )
        if stage.num_gpus and not stage.kv_cache_bytes:
            raise CatalogError(
                source,
                f"{place}.kv_cache_bytes",
                f"a worker of {stage.ranks} ranks does not measure its cache yet",
                "Give kv_cache_bytes, which is each rank's; `serve-app plan` tells how much there is.",
            )


def check_room(record: ModelRecord, profile: Profile, gpus: Sequence[float], source: Path) -> None:
    """Raises CatalogError for a worker that asks for more GPUs than the cluster can ever have. ``gpus``: of each of its
    nodes.
    """
    for name, stage in profile.stages.items():
        needed = stage.ranks * stage.num_gpus
        # Ranks that divide a layer are on one node, and with stages wherever there is room.
        apart = stage.pipeline_parallel > 1
        there = sum(gpus) if apart else max(gpus, default=0.0)
        if stage.ranks == 1 or needed <= there:
            continue
        has = f"there are {there:g}" if apart or len(gpus) < 2 else f"no node has more than {there:g}"
        raise CatalogError(
            source,
            f"serving.*.{name}.tensor_parallel",
            f"a worker of {record.id} takes {needed:g} GPUs, one for each of its {stage.ranks} ranks, and {has}",
            f"Add {needed - there:g} GPUs, or divide the model among fewer ranks.",
        )


def _obstacle(record: ModelRecord, name: str, stage: Stage) -> str:
    if name not in ENGINES:
        return f"{name} stage"
    if record.quantization == "fp8" and stage.pipeline_parallel > 1:
        return f"quantization {record.quantization} in stages"
    return ""
