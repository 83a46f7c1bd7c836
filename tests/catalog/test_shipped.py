"""The records that come with the project, their prices, and how models/search shows them."""

import pytest

from serve_app.catalog import load_catalog
from serve_app.catalog.search import search_record
from serve_app.catalog.tasks import declared

CATALOG = load_catalog()
# Tasks whose models have to be fetched.
FETCHED = {"text-to-image"}
IDS = [record.id for record in CATALOG]


def test_both_profiles_have_all_tasks_that_have_models_here() -> None:
    assert {record.task for record in CATALOG if "gpu" in record.serving} == set(declared())
    local = {record.task for record in CATALOG if "local" in record.serving}
    assert local == set(declared()) - FETCHED


def test_the_local_profile_is_disaggregated_and_drafts() -> None:
    record = CATALOG["@cf/pico/pico-instruct"]
    stages = record.serving["local"].stages
    assert list(stages) == ["decode", "prefill", "draft"] and record.draft is not None
    assert all(stage.min_replicas == 1 and stage.num_gpus == 0 for stage in stages.values())


@pytest.mark.parametrize("model", IDS)
def test_search_values_are_text_and_price_is_an_array(model: str) -> None:
    shown = search_record(CATALOG[model])
    assert set(shown) >= {"id", "source", "name", "description", "task", "created_at", "tags", "properties"}
    assert shown["name"] == model and set(shown["task"]) == {"id", "name", "description"}
    for item in shown["properties"]:
        assert set(item) == {"property_id", "value"}
        if item["property_id"] == "price":
            assert all(set(row) == {"unit", "price", "currency", "neurons"} for row in item["value"])
        else:
            assert isinstance(item["value"], str) and item["value"] not in ("True", "False", "None")


def test_search_ids_are_stable_and_distinct() -> None:
    shown = [search_record(CATALOG[model])["id"] for model in IDS]
    assert len(set(shown)) == len(IDS)
    assert shown == [search_record(record)["id"] for record in load_catalog()]


@pytest.mark.parametrize("model", [model for model in IDS if "gpu" in CATALOG[model].serving])
def test_gpu_models_sleep_until_asked_and_fit_one_gpu_or_the_ranks_of_a_node(model: str) -> None:
    profile = CATALOG[model].serving["gpu"]
    if any(stage.ranks > 1 for stage in profile.stages.values()):
        # What is divided has GPUs of its own, all of them on one node of `cluster.yaml`.
        for stage in profile.stages.values():
            assert stage.num_gpus == 1 and stage.tensor_parallel == stage.ranks <= 8
    assert all(stage.min_replicas == 0 for stage in profile.stages.values())
    assert 0 < sum(stage.num_gpus for stage in profile.stages.values()) <= 1


def test_gpu_text_models_have_latencies_to_keep_to() -> None:
    """Without them admission lets everybody wait, and the planner guesses."""
    text = [r for r in CATALOG if r.task == "text-generation" and "gpu" in r.serving]
    assert text
    for record in text:
        targets = record.serving["gpu"].targets
        assert targets.ttft_s is not None and targets.itl_s is not None, record.id
        assert targets.itl_s < targets.ttft_s
