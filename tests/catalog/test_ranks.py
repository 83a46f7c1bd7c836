"""Records whose workers have several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.ranks import check_ranks, check_room
from serve_app.catalog.records import ModelRecord

RECORD = {
    "id": "@cf/me/large", "task": "text-generation", "description": "Large.", "created_at": "2026-01-31",
    "weights": {"repo": "me/large"},
}  # fmt: skip


def record(profile: str = "gpu", other: dict | None = None, **stage) -> ModelRecord:
    return ModelRecord.model_validate({**RECORD, "serving": {profile: {"decode": stage}}, **(other or {})})


def check(found: ModelRecord) -> None:
    [profile] = found.serving
    check_ranks(found, profile, Path("large.yaml"))


GPUS = {"tensor_parallel": 4, "num_gpus": 1, "kv_cache_bytes": "8GiB"}


def test_ranks_are_a_stage_s_own():
    found = record(**GPUS, pipeline_parallel=2)
    check(found)
    assert found.serving["gpu"].stages["decode"].ranks == 8
    check(record("local", tensor_parallel=2))
    check(record("local", tensor_parallel=2, expert_parallel=2))
    check(record("local", tensor_parallel=2, expert_parallel=2, expert_dispatch="always"))
    check(record("local", tensor_parallel=2, other={"lora": True}))
    check(record("local", pipeline_parallel=2, other={"lora": True, "quantization": "int8"}))
    for method in ("eagle3", "model"):
        check(record(**GPUS, other={"draft": {"method": method, "weights": {"repo": "me/draft"}}}))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (record(**GPUS, expert_parallel=2), "which are 4 and not 2"),
        (record("local", expert_parallel=2), "which are 1 and not 2"),
        (record("local", tensor_parallel=2, expert_dispatch="always"), "it is for ranks that hold whole experts"),
        (record("local", tensor_parallel=2, expert_copies=1), "leave expert_copies out"),
        (record(**{**GPUS, "num_gpus": 0.5}), "one GPU or none, and not 0.5"),
        (record(tensor_parallel=2, num_gpus=1), "does not measure its cache yet"),
        (record(**GPUS, pipeline_parallel=2, other={"quantization": "fp8"}), "has no quantization fp8 in stages"),
    ],
)
def test_what_several_ranks_can_not_do_is_refused_by_name(found, said):
    with pytest.raises(CatalogError, match=said):
        check(found)


def test_more_gpus_than_there_can_be():
    found = record(**GPUS)
    check_room(found, found.serving["gpu"], [4.0], Path("large.yaml"))
    with pytest.raises(CatalogError, match="takes 4 GPUs, one for each of its 4 ranks, and there are 2.*Add 2 GPUs"):
        check_room(found, found.serving["gpu"], [2.0], Path("large.yaml"))
    # Ranks that divide a layer are on one node.
    with pytest.raises(CatalogError, match="takes 4 GPUs.* and no node has more than 3.*Add 1 GPUs"):
        check_room(found, found.serving["gpu"], [3.0, 3.0], Path("large.yaml"))
    apart = record(**{**GPUS, "tensor_parallel": 2}, pipeline_parallel=2)
    check_room(apart, apart.serving["gpu"], [2.0, 2.0], Path("large.yaml"))
    # So are those of each stage.
    with pytest.raises(
        CatalogError, match="takes 4 GPUs.* room for 1 of 2 stages, each on one node with 2.*Add 2 GPUs"
    ):
        check_room(apart, apart.serving["gpu"], [3.0, 1.0], Path("large.yaml"))
    # Whole experts may be apart, where no node has room for all.
    experts = record(**GPUS, expert_parallel=4)
    check_room(experts, experts.serving["gpu"], [3.0, 1.0], Path("large.yaml"))
    with pytest.raises(CatalogError, match="takes 4 GPUs.* there are 3"):
        check_room(experts, experts.serving["gpu"], [2.0, 1.0], Path("large.yaml"))
    small = record("local", tensor_parallel=2)
    check_room(small, small.serving["local"], [0.0], Path("large.yaml"))
