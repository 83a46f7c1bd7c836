"""What a local server asks of its profile before it starts Ray."""

from __future__ import annotations

from serve_app.catalog.load import load_catalog
from serve_app.cluster import compute_on_cpus


def test_torch_is_imported_for_forks_where_a_stage_computes_on_a_cpu():
    catalog = load_catalog()
    assert compute_on_cpus(catalog.started("local"))
    on_gpus = catalog.started("gpu", ["@cf/meta/llama-3.1-8b-instruct"])
    assert on_gpus and not compute_on_cpus(on_gpus)
    [(record, profile)] = on_gpus
    without = profile.prefill.model_copy(update={"num_gpus": 0})
    assert compute_on_cpus([(record, profile.model_copy(update={"prefill": without}))])
