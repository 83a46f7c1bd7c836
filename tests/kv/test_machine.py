"""What fetches cost here before one was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.costs.transfers import FetchSample, TierCost
from serve_app.kv.costs import PRIORS, FetchCosts
from serve_app.kv.machine import memory_bytes_s, network_bytes_s, priors
from serve_app.routing.costs import CostModel


def device(root: Path, name: str, speed: str, *, state: str = "up", virtual: bool = False) -> None:
    folder = root / name
    folder.mkdir()
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "speed").write_text(f"{speed}\n")
    if not virtual:
        (folder / "device").mkdir()


def test_the_fastest_device_that_is_up_tells_the_speed_of_the_network(tmp_path: Path) -> None:
    assert network_bytes_s(tmp_path) is network_bytes_s(tmp_path / "none") is None
    device(tmp_path, "eth0", "10000")
    device(tmp_path, "eth1", "25000")
    device(tmp_path, "eth2", "400000", state="down")
    device(tmp_path, "docker0", "100000", virtual=True)
    device(tmp_path, "ens5", "-1")
    device(tmp_path, "ib0", "unknown")
    assert network_bytes_s(tmp_path) == 25e9 / 8
    found = priors(tmp_path)
    assert found["remote"] == (PRIORS["remote"][0], 25e9 / 8) and found["disk"] == PRIORS["disk"]
    # A copy in memory; a machine of today does more than a slow disk and less than a processor's registers.
    assert 1e8 < found["node"][1] < 1e13 and memory_bytes_s() > 0


def test_where_no_device_tells_it_a_fetch_is_tried(tmp_path: Path) -> None:
    device(tmp_path, "ens5", "-1")
    costs = FetchCosts(priors(tmp_path))
    # 12,000 tokens of an 8B model, computed at 50,000 a second: worth a fetch until one has shown otherwise.
    nbytes = 12_000 * 131_072
    costs.prefill.add(50_000, 1.0)
    costs.tiers["remote"].add(1, 0.0)
    assert costs.worth("remote", 12_000 * 4, nbytes)
    for _ in range(3):
        costs.measured("remote", nbytes, 20.0)
    assert not costs.worth("remote", 12_000 * 4, nbytes)


def test_a_gateway_believes_workers_until_a_fetch_is_measured() -> None:
    costs = CostModel()
    prior = costs.latency("node")
    costs.expect([TierCost("remote", 0.004, 1e-5), TierCost("node", 0.0, 2e-6)], "a")
    assert costs.fetch_seconds("remote", 1000) == pytest.approx(0.014)
    assert costs.transfer_seconds("node", 1) == pytest.approx(2e-6)
    # Another has another machine; and each is asked once.
    for _ in range(3):
        costs.expect([TierCost("remote", 0.008, 3e-5)], "b")
    assert costs.transfer_seconds("remote", 1) == pytest.approx(2e-5) and costs.latency("remote") == pytest.approx(
        0.006
    )
    for _ in range(20):
        costs.take([], [FetchSample("remote", 10_000, 0.5)], "a")
    learned = costs.transfer_seconds("remote", 1)
    assert 4e-5 < learned < 6e-5
    costs.expect([TierCost("remote", 0.004, 1e-5), TierCost("node", 0.0, 1e-6)], "c")
    assert costs.transfer_seconds("remote", 1) == learned and costs.transfer_seconds("node", 1) < 2e-6
    # A latency that nobody has named is still measured by small fetches.
    for _ in range(100):
        costs.take([], [FetchSample("node", 32, 0.02)], "a")
    assert prior < costs.latency("node") == pytest.approx(0.02, rel=0.01)
    assert costs.transfer_seconds("node", 8192) < 0.03
