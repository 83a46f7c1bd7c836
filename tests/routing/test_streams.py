"""Places kept for tenants below their share."""

from __future__ import annotations

from serve_app.routing.admission import Admission, AdmissionConfig, Targets
from serve_app.routing.fairness import FairQueue
from serve_app.routing.streams import KEEP_S, Streams
from serve_app.routing.types import Decision
from tests.routing.fleets import load, request, router


def test_a_place_is_kept_for_who_is_below_its_share_and_for_a_moment_only():
    streams = Streams(keep=1.0)
    for tenant in ("heavy", "heavy", "heavy", "light"):
        streams.begin(tenant)
    streams.end("light", 10.0)
    assert streams.kept_from("heavy", 10.5) == 1 and streams.kept_from("light", 10.5) == 0
    streams.begin("light")  # back in time: it has its place, and none is kept any more
    assert streams.kept_from("heavy", 10.6) == 0
    streams.end("light", 11.0)
    assert streams.kept_from("heavy", 12.0) == 0


def test_nothing_is_kept_for_who_has_most_or_is_alone_or_has_left():
    streams = Streams(keep=1.0)
    for tenant in ("heavy", "heavy", "heavy", "light"):
        streams.begin(tenant)
    streams.end("heavy", 0.0)
    assert streams.kept_from("light", 0.0) == 0
    streams.end("light", None)
    assert streams.kept_from("heavy", 0.0) == 0
    alone = Streams(keep=1.0)
    alone.begin("one")
    alone.end("one", 0.0)
    assert not alone and alone.kept_from("other", 0.0) == 0


def test_a_flood_does_not_take_the_place_between_two_requests_of_a_light_tenant():
    a = Admission(router(load("a")), FairQueue(), AdmissionConfig(Targets(itl=1.0), window_s=9.0))
    for name, tenant in (("h0", "heavy"), ("h1", "heavy"), ("h2", "heavy"), ("l0", "light")):
        assert isinstance(a.place(request(name, 50, tenant=tenant), 0.0), Decision)
    a.finished("l0", 1.0)
    one, costs = request("more", 50, tenant="heavy"), a.router.costs
    # There is room for one more stream, and not for two.
    stream = costs.d1 + costs.d2 * (one.prompt_tokens + one.expected_output_tokens)
    target = a.router.choose(one, 1.0).itl + stream / 2
    a.config = AdmissionConfig(Targets(itl=target), window_s=9.0)
    assert a.place(one, 1.0 + KEEP_S / 2) is None
    assert isinstance(a.place(request("l1", 50, tenant="light"), 1.0 + KEEP_S / 2), Decision)
    a.finished("l1", 2.0)
    assert isinstance(a.place(one, 2.0 + 2 * KEEP_S), Decision)
