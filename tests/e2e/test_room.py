"""Workers of more ranks than there is room for, on a real Ray without GPUs: refused at start, or shown as waiting."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
import yaml

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import BUILT_IN, PROJECT_ROOT
from serve_app.cluster import LocalCluster
from serve_app.config import load_settings
from tests.e2e.beside import served_beside
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
MODEL = "@cf/pico/wide"


@pytest.fixture
def settings(tmp_path):
    """Of a server with the chat model on four GPUs, two of which divide its layers."""
    found: dict[str, Any] = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    for name in ("draft", "lora"):
        del found[name]
    decode = {"num_cpus": 0.1, "num_gpus": 1, "tensor_parallel": 2, "pipeline_parallel": 2, "kv_cache_bytes": "64MiB"}
    decode |= {"min_replicas": 1, "max_replicas": 1}
    weights = {"path": str(PROJECT_ROOT / "checkpoints" / "pico-instruct")}
    (tmp_path / "models").mkdir()
    record = {**found, "id": MODEL, "weights": weights, "serving": {"local": {"decode": decode}}}
    (tmp_path / "models" / "wide.yaml").write_text(yaml.safe_dump(record))
    return load_settings({"SERVE_APP_HOME": str(tmp_path), "SERVE_APP_MODELS": MODEL})


def test_a_server_that_can_never_place_a_worker_does_not_start(ray_cluster, settings):
    level = logging.getLogger("ray.serve").level
    with pytest.raises(CatalogError, match="takes 4 GPUs, one for each of its 4 ranks, and there are 0") as refused:
        LocalCluster(settings).start_serving()
    logging.getLogger("ray.serve").setLevel(level)
    assert "Add 4 GPUs, or divide the model among fewer ranks" in str(refused.value)


def test_a_worker_that_waits_for_nodes_is_shown_in_health(stack, settings):
    """As under ``serve deploy``, where nodes may come. Serve says so half a minute after it has asked for them."""
    with served_beside(stack.url, settings, MODEL, "wide") as http:

        def told() -> str:
            try:
                found = http.get("/health")
                assert found.status_code in (404, 502, 503), found.text
                return found.json()["models"][MODEL]["deployments"]["decode"]
            except (httpx.HTTPError, KeyError, ValueError):
                return ""

        said = wait_for(told, 180, 0.5)
        assert said.count('"GPU": 2.0') == 2 and "total resources available: {}" in said, said
        asked = http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 1})
        assert asked.status_code == 503 and asked.headers["retry-after"]
