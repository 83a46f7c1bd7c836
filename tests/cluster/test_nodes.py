from __future__ import annotations

import pytest

from serve_app.ray_private import environment as env
from tests.cluster.apart import told_by


@pytest.mark.slow
def test_workers_pools_and_a_node_die_and_every_answer_is_right():
    """Only misses, never an error or a wrong token: see ``nodes.py``."""
    found = told_by("tests.cluster.nodes", env.client_env(), 420)
    # 4 + 6 + 4 + 6 + 6 + 6 conversations of two turns, and two hand-overs.
    assert found["right"] == 66
    assert found["remote"] > 0 and found["handed_over"] > 0
