"""The waiting room: bounded unfairness, no starvation, shares of the classes, and locality within the bound."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.fairness import FairConfig, FairQueue
from serve_app.routing.types import RouteRequest


def request(name: str, tenant: str = "a", prompt: int = 100, output: int = 50, **more) -> RouteRequest:
    return RouteRequest(name, prompt, tenant=tenant, expected_output_tokens=output, max_tokens=output, **more)


def pop(queue: FairQueue) -> RouteRequest | None:
    """The next request has its turn."""
    first = queue.heads(1)
    if not first:
        return None
    queue.take(first[0].id)
    return first[0]


def cost(r: RouteRequest, config: FairConfig, cached: int = 0) -> float:
    return (r.prompt_tokens - cached) * config.uncached_weight + cached * config.cached_weight + (
        min(r.expected_output_tokens, r.max_tokens) * config.output_weight
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500), st.booleans()), min_size=20, max_size=60),
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500), st.booleans()), min_size=20, max_size=60),
    st.floats(0.25, 4.0),
    st.sampled_from([0.0, 1000.0, 20_000.0]),
)
@settings(max_examples=60, deadline=None)
def test_two_tenants_that_always_wait_are_served_alike(first, second, weight, slack) -> None:
    config = FairConfig(slack=slack)
    cached = {}
    queue = FairQueue(config, lambda r: cached[r.id])
    largest = 0.0
    for tenant, sizes, share in (("a", first, 1.0), ("b", second, weight)):
        for i, (prompt, output, hit) in enumerate(sizes):
            r = request(f"{tenant}{i}", tenant, prompt, output)
            cached[r.id] = prompt // 2 if hit else 0
            largest = max(largest, cost(r, config) / share)
            r.weight = share
            queue.push(r)
    served = {"a": 0.0, "b": 0.0}
    while all(t in queue.lengths() for t in "ab"):
        r = pop(queue)
        served[r.tenant] += cost(r, config, cached[r.id]) / (1.0 if r.tenant == "a" else weight)
        assert abs(served["a"] - served["b"]) <= slack + 2 * largest + 1e-6


def test_a_flood_does_not_keep_a_light_tenant_waiting() -> None:
    queue = FairQueue()
    for i in range(1000):
        queue.push(request(f"flood{i}", "heavy", 4000))
    for _ in range(10):
        pop(queue)
    queue.push(request("light", "light", 4000))
    assert "light" in [pop(queue).id for _ in range(2)]


def test_idleness_earns_nothing() -> None:
    queue = FairQueue(FairConfig(slack=0.0))
    for i in range(50):
        queue.push(request(f"a{i}", "a"))
    for _ in range(40):
        pop(queue)
    for i in range(50):
        queue.push(request(f"b{i}", "b"))
    order = "".join(pop(queue).tenant for _ in range(10))
    assert order.count("b") <= 6


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=200), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_nobody_starves_behind_shorter_ones(sizes: list[int], large: int) -> None:
    """Whoever came more than work/aging seconds earlier goes first, however short the others are."""
    config = FairConfig(aging=1000.0)
    queue = FairQueue(config)
    queue.push(request("long", prompt=large + 1, arrived_at=0.0))
    for i, size in enumerate(sizes):
        queue.push(request(str(i), prompt=size, arrived_at=10.0 * i))
    before = []
    while (r := pop(queue)).id != "long":
        before.append(r)
    assert all(r.arrived_at <= (large + 1) / config.aging for r in before)


def test_shorter_first_and_first_come_where_asked_for() -> None:
    for aging, expected in ((1000.0, ["short", "long"]), (math.inf, ["long", "short"])):
        queue = FairQueue(FairConfig(aging=aging))
        queue.push(request("long", prompt=9000, arrived_at=0.0))
        queue.push(request("short", prompt=100, arrived_at=1.0))
        assert [pop(queue).id for _ in range(2)] == expected


def test_batch_gets_its_share_and_no_more_while_there_is_realtime_work() -> None:
    queue = FairQueue(FairConfig(shares={"realtime": 0.9, "batch": 0.1}))
    for i in range(400):
        queue.push(request(f"r{i}", "a", priority="realtime"))
        queue.push(request(f"b{i}", "b", priority="batch"))
    kinds = [pop(queue).priority for _ in range(300)]
    assert kinds.count("batch") == pytest.approx(30, abs=2)
    # Alone it gets everything.
    while len(queue):
        last = pop(queue)
    assert last.priority == "batch"


def test_a_cached_prompt_goes_first_only_within_the_slack() -> None:
    held = {"b0": 5000}
    queue = FairQueue(FairConfig(slack=1000.0), lambda r: held.get(r.id, 0))
    queue.push(request("a0", "a", 6000))
    queue.push(request("b0", "b", 6000))
    assert queue.heads(1)[0].id == "b0"
    assert pop(queue).id == "b0"
    queue.charge("realtime", "b", 50_000, 0, 0)
    held["b1"] = 5000
    queue.push(request("b1", "b", 6000))
    assert pop(queue).id == "a0"


def test_what_was_served_in_the_end_is_what_counts() -> None:
    queue = FairQueue(FairConfig(slack=0.0))
    queue.push(request("a0", "a", 100, output=10_000))
    queue.push(request("b0", "b", 100, output=10))
    queue.push(request("b1", "b", 100, output=10))
    first = pop(queue)
    before = queue.counters()[first.tenant]
    queue.settle(first.id, 100, 0, 3)
    assert queue.counters()[first.tenant] == pytest.approx(before - 2.0 * (min(first.max_tokens, 10_000) - 3))
    queue.settle("nobody", 1, 1, 1)


def test_removal_costs_nothing_and_leaves_no_trace() -> None:
    queue = FairQueue()
    queue.push(request("a0"))
    queue.push(request("a1"))
    assert queue.counters() == {"a": 0.0}
    assert queue.waiting_tokens() == 200 and len(queue) == 2
    assert queue.remove("a0").id == "a0" and queue.remove("a0") is None
    assert queue.waiting_tokens() == 100 and queue.lengths() == {"a": 1}
    assert pop(queue).id == "a1" and pop(queue) is None and "a1" not in queue
    with pytest.raises(ValueError, match="positive"):
        queue.push(request("x", weight=0))


def test_what_is_ahead_is_what_would_be_served_before() -> None:
    queue = FairQueue()
    for i in range(5):
        queue.push(request(f"a{i}", "heavy", 1000))
    assert queue.ahead(request("x", "heavy", 1000)) == 5000
    assert queue.ahead(request("y", "light", 1000)) < 1000
