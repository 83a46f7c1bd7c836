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
        if stage.ranks == 1 or not stage.num_gpus:
            continue
        needed, there, largest = stage.ranks * stage.num_gpus, sum(gpus), max(gpus, default=0.0)
        # GPUs that are on one node, and how many such places there are.
        each = stage.num_gpus * (1 if lies_apart(stage, largest) else stage.tensor_parallel)
        places, wanted = sum(int(own // each) for own in gpus), round(needed / each)
        if places >= wanted:
            continue
        if there < needed and (wanted > 1 or len(gpus) < 2):
            has, more = f"there are {there:g}", needed - there
        elif largest < each:
            has, more = f"no node has more than {largest:g}", each - largest
        else:
            has = f"there is room for {places} of {wanted} stages, each on one node with {each:g}"
            more = each * (wanted - places)
        raise CatalogError(
            source,
            f"serving.*.{name}.tensor_parallel",
            f"a worker of {record.id} takes {needed:g} GPUs, one for each of its {stage.ranks} ranks, and {has}",
            f"Add {more:g} GPUs, or divide the model among fewer ranks.",
        )


def lies_apart(stage: Stage, largest: float) -> bool:
    """Whether the ranks of a layer may be on several nodes, of which the ``largest`` has so many GPUs: those with whole
    experts that no node has room for. Ranks that divide everything are always on one.
    """
    return stage.expert_parallel > 1 and 0 < largest < stage.tensor_parallel * stage.num_gpus


def _obstacle(record: ModelRecord, name: str, stage: Stage) -> str:
    if name not in ENGINES:
        return f"{name} stage"
    if record.quantization == "fp8" and stage.pipeline_parallel > 1:
        return f"quantization {record.quantization} in stages"
    return ""
