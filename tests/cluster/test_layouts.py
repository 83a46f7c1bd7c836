from __future__ import annotations

import pytest

from serve_app.ray_private import environment as env
from tests.cluster.apart import told_by


@pytest.mark.slow
def test_k_v_move_between_divisions_on_two_nodes():
    """By the pool of a node, by files, and from another node while a prompt is computed: see ``layouts.py``."""
    found = told_by("tests.cluster.layouts", env.client_env(), 580)
    # Each of four divisions takes over from each other while that computes; those of one node fetch, and read files.
    assert found["right"] == 12 + 4 + 4
    here = {"four to stages", "stages to four", "two to one", "one to two"}
    assert found["pools"] == {way: {"node": 299} for way in here}
    assert len(found["handed over"]) == 12
    assert all(path["prefilled"] == 299 for path in found["handed over"].values())
    assert found["files"] == {way: {"disk": 299} for way in here}
    # Every rank took its part itself. It gave it as well, but for the second of two that hold the same head.
    gave = {name: [given > 0 for given, _ in ranks] for name, ranks in found["moved"].items()}
    assert gave == {"four": [False, True, False], "two": [True], "stages": [True], "one": []}, found["moved"]
    assert all(taken for ranks in found["moved"].values() for _, taken in ranks), found["moved"]
