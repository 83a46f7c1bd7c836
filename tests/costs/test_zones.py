"""How far zones are from each other."""

import pytest

from serve_app.costs.zones import FAR, NEAR, SAME_REGION, distance


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ("eu/a", "eu/a", NEAR),
        ("eu/a", "eu/b", SAME_REGION),
        ("eu/a", "us/a", FAR),
        ("a", "b", SAME_REGION),
        ("a", "eu/b", FAR),
        ("", "eu/a", NEAR),
        ("eu/a", "", NEAR),
        ("", "", NEAR),
        ("eu/", "eu/a", SAME_REGION),
        ("eu/", "us/", FAR),
    ],
)
def test_zones_are_near_in_one_region_and_far_in_two(one: str, other: str, apart: int) -> None:
    assert distance(one, other) == distance(other, one) == apart
