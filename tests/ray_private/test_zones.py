"""The zone of a node, from its labels or as its operator says."""

import pytest
import ray

from serve_app.ray_private.zones import REGION, VARIABLE, ZONE, node_zone, zone_of


@pytest.mark.parametrize(
    ("labels", "zone"),
    [
        ({}, ""),
        ({ZONE: "eu-1a"}, "eu-1a"),
        ({ZONE: "eu-1a", REGION: "eu-1"}, "eu-1/eu-1a"),
        ({ZONE: ["eu-1a"], REGION: ["eu-1"]}, "eu-1/eu-1a"),
        ({REGION: "eu-1"}, "eu-1/"),
        ({ZONE: 7, REGION: []}, ""),
        ({ZONE: "x" * 500}, "x" * 120),
    ],
)
def test_labels_say_it(labels, zone) -> None:
    assert zone_of(labels) == zone


def test_the_operator_comes_first(monkeypatch) -> None:
    class Context:
        def get_node_labels(self):
            return {ZONE: "eu-1a"}

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    assert node_zone() == "eu-1a"
    monkeypatch.setenv(VARIABLE, " home/rack-2 ")
    assert node_zone() == "home/rack-2"
