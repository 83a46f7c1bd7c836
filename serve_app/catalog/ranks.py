"""Whether a record's workers of several processes can be started."""

from __future__ import annotations

from pathlib import Path

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.records import ModelRecord, Profile, ProfileName, Stage

# Stages whose workers are engines.
ENGINES = ("decode", "prefill")


def check_ranks(record: ModelRecord, profile_name: ProfileName, source: Path) -> None:
    """Raises CatalogError for what workers of several ranks can't do yet."""
    for name, stage in record.serving[profile_name].stages.items():
        place = f"serving.{profile_name}.{name}"
        if stage.expert_parallel > 1:
            raise CatalogError(
                source,
                f"{place}.expert_parallel",
                "ranks divide every expert's columns, and do not hold whole experts yet",
                "Leave expert_parallel out; tensor_parallel divides experts as well.",
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


def check_room(record: ModelRecord, profile: Profile, gpus: float, source: Path) -> None:
    """Raises CatalogError for a worker that asks for more GPUs than the cluster can ever have."""
    for name, stage in profile.stages.items():
        needed = stage.ranks * stage.num_gpus
        if stage.ranks > 1 and needed > gpus:
            raise CatalogError(
                source,
                f"serving.*.{name}.tensor_parallel",
                f"a worker of {record.id} takes {needed:g} GPUs, one for each of its {stage.ranks} ranks, and there "
                f"are {gpus:g}",
                f"Add {needed - gpus:g} GPUs, or divide the model among fewer ranks.",
            )


def _obstacle(record: ModelRecord, name: str, stage: Stage) -> str:
    if name not in ENGINES:
        return f"{name} stage"
    if record.adapters is not None:
        return "adapters (lora)"
    if record.quantization != "none":
        return f"quantization {record.quantization}"
    if record.draft is not None and record.draft.method == "eagle3":
        return "EAGLE-3 head (draft.method)"
    return ""
