"""Serve's controller goes on looking after replicas and HAProxy where the wall clock is put back."""

from __future__ import annotations

import time

import pytest
from ray._common import utils
from ray.serve._private import deployment_state

from serve_app.ray_private.steady import SteadyTime, measure_steadily


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_it_goes_on_where_the_wall_clock_jumps(monkeypatch, seconds):
    for module, name in ((deployment_state, "time"), (utils.Timer, "time")):
        monkeypatch.setattr(module, name, getattr(module, name))
    measure_steadily()
    timer, wall = utils.Timer(), time.time
    before = deployment_state.time.time(), timer.time(), wall()
    assert abs(before[0] - before[2]) < 1 and before[0] <= before[1]
    monkeypatch.setattr(time, "time", lambda: wall() + seconds)
    after = deployment_state.time.time(), timer.time()
    assert all(0 <= now - then < 60 for now, then in zip(after, before, strict=False))


def test_all_else_is_times():
    assert SteadyTime().sleep is time.sleep and SteadyTime().monotonic is time.monotonic
