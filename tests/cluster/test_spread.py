from __future__ import annotations

import pytest

from serve_app.ray_private import environment as env
from tests.cluster.apart import told_by


@pytest.mark.slow
def test_ranks_of_a_layer_are_on_one_node_and_stages_wherever_there_is_room():
    """On two nodes of three GPUs each: see ``spread.py``."""
    found = told_by("tests.cluster.spread", env.client_env(), 170)
    assert all(each["beside its replica"] for each in found.values())
    assert {name: each["gpus"] for name, each in found.items()} == {
        "one": 1, "layers": 3, "stages": 4, "thin": 4, "experts": 4,
    }  # fmt: skip
    assert {name: each["nodes of stages"] for name, each in found.items()} == {
        "one": [1], "layers": [1], "stages": [1, 1], "thin": [1] * 4, "experts": [2],
    }  # fmt: skip
    assert [found[name]["nodes"] for name in ("stages", "thin")] == [2, 2]
