"""What placement groups are asked for, by the shape of a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deployments import blueprint, rank_worker
from deployments.bundles import bundle_of, bundles
from serve_app.catalog.records import Stage
from serve_app.parallel.place import Place
from serve_app.worker.spec import WorkerSpec

STAGE = {"num_cpus": 2, "num_gpus": 1, "kv_cache_bytes": "1GiB"}


def stage(tensor: int = 1, pipeline: int = 1, experts: int = 1) -> Stage:
    ranks = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "expert_parallel": experts}
    return Stage.model_validate({**STAGE, **ranks})


@pytest.mark.parametrize(
    ("shape", "largest", "gpus", "strategy"),
    [
        ((1, 1), 8, [1], "STRICT_PACK"),
        ((4, 1), 8, [4], "STRICT_PACK"),
        ((4, 1), 2, [4], "STRICT_PACK"),  # which waits for a node that has them
        ((4, 2), 8, [4, 4], "PACK"),
        ((1, 3), 1, [1, 1, 1], "PACK"),
        ((8, 1, 8), 8, [8], "STRICT_PACK"),
        ((8, 1, 8), 0, [8], "STRICT_PACK"),
        ((8, 1, 8), 4, [1] * 8, "PACK"),
        ((4, 2, 4), 4, [4, 4], "PACK"),
    ],
)
def test_a_stage_is_a_bundle(shape, largest, gpus, strategy):
    found, named = bundles(stage(*shape), 1, largest)
    assert [each["GPU"] for each in found] == gpus and named == strategy
    assert [each.get("CPU") for each in found] == [2, *[None] * (len(gpus) - 1)]


def test_ranks_go_to_the_bundle_of_their_stage():
    assert [bundle_of(Place(4, 2, rank), 2) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [bundle_of(Place(4, 1, rank), 1) for rank in range(4)] == [0] * 4
    # Of whole experts that are apart each rank has its own.
    assert [bundle_of(Place(4, 2, rank, whole_experts=True), 8) for rank in range(8)] == list(range(8))


def test_a_deployment_asks_for_them(monkeypatch):
    deployment = SimpleNamespace(options=lambda **options: options)
    monkeypatch.setattr(blueprint, "_largest_node", lambda: 8.0)
    asked = blueprint._sized(deployment, stage(4, 2), 1)
    assert asked["placement_group_bundles"] == [{"CPU": 2, "GPU": 4}, {"GPU": 4}]
    assert asked["placement_group_strategy"] == "PACK" and "max_surge_percent" not in asked
    on_cpus = blueprint._sized(deployment, stage(4, 2).model_copy(update={"num_gpus": 0}), 0)
    assert "placement_group_bundles" not in on_cpus


def test_a_rank_with_a_gpu_is_placed_in_its_group(monkeypatch):
    spec = WorkerSpec(
        model="m", stage="decode", weights={}, source="", home="", device="cuda", tensor_parallel=2, pipeline_parallel=2
    )
    with pytest.raises(RuntimeError, match="within their replica's placement group"):
        monkeypatch.setattr(rank_worker, "get_current_placement_group", lambda: None)
        rank_worker.placed(spec, 1)
    group = SimpleNamespace(bundle_specs=[{"GPU": 2}] * 2)
    monkeypatch.setattr(rank_worker, "get_current_placement_group", lambda: group)
    for rank in range(4):
        options = rank_worker.placed(spec, rank)
        strategy = options["scheduling_strategy"]
        assert options["num_gpus"] == 1 and strategy.placement_group is group
        assert strategy.placement_group_bundle_index == rank // 2
