"""Requests per minute: the numbers in the headers, the refusal, and the count of several gateways."""

from __future__ import annotations

import pytest

from serve_app.api.errors import RateLimited
from serve_app.state.errors import Away
from serve_app.state.rates import RateLimiter

LIMITS = {"text-generation": 3}


class Clock:
    def __init__(self) -> None:
        self.now = 6000.0

    def __call__(self) -> float:
        return self.now


class Gone:
    def add(self, minute, counts):
        raise Away("gone")


def limiter(quota: int, clock: Clock | None = None) -> RateLimiter:
    return RateLimiter({"text-generation": quota}, clock=clock or Clock())


def passed(limited: RateLimiter, requests: int) -> int:
    """How many of an account's requests are let through."""
    found = 0
    for _ in range(requests):
        try:
            limited.take("a", "text-generation")
            found += 1
        except RateLimited:
            pass
    return found


def test_counts_refuses_and_starts_again():
    clock = Clock()
    limited = limiter(3, clock)
    assert limited.take("a", "text-generation") == {
        "Ratelimit": '"text-generation";r=2;t=60',
        "Ratelimit-Policy": '"text-generation";q=3;w=60',
    }
    clock.now += 59.5
    limited.take("a", "text-generation")
    assert limited.take("a", "text-generation")["Ratelimit"].endswith("r=0;t=1")
    for _ in range(2):
        with pytest.raises(RateLimited) as caught:
            limited.take("a", "text-generation")
    error = caught.value
    assert (error.code, error.status) == (971, 429)
    assert error.headers["Retry-After"] == "1" and error.headers["Ratelimit"] == '"text-generation";r=0;t=1'
    # Another account has its own count, another task none at all.
    assert "r=2" in limited.take("b", "text-generation")["Ratelimit"]
    assert limited.take("a", "reranking") == {}
    clock.now += 1
    assert "r=2" in limited.take("a", "text-generation")["Ratelimit"]


def test_without_a_limit_nobody_is_told():
    told = []
    limited = RateLimiter(LIMITS, lambda: told.append(1))
    assert limited.take("a", "reranking") == {} and not told
    limited.take("a", "text-generation")
    assert told


def test_gateways_that_exchange_share_one_count(store, open_store):
    """Two that tell each other after each request let through exactly the limit."""
    gateways = [(limiter(50), store), (limiter(50), open_store("elsewhere"))]
    let = 0
    for n in range(100):
        limited, its = gateways[n % 2]
        let += passed(limited, 1)
        limited.exchange(its.rates)
    # The exchange of the one comes after the request of the other: one may be unknown.
    assert let in (50, 51)


def test_what_one_let_through_in_between_is_all_that_goes_beyond(store):
    gateways = [limiter(50) for _ in range(4)]
    let = sum(passed(limited, 10) for limited in gateways)
    for limited in gateways:
        limited.exchange(store.rates)
    assert let == 40
    # Each knows the sum as of its own exchange now: the first 10, the last 40.
    let += sum(passed(limited, 25) for limited in gateways[::-1])
    assert let <= 50 + 3 * 25
    for limited in gateways:
        limited.exchange(store.rates)
    assert sum(passed(limited, 5) for limited in gateways) == 0


def test_a_minute_that_is_over_counts_nowhere(store):
    clock, behind = Clock(), Clock()
    first, second = limiter(50, clock), limiter(50, behind)
    assert passed(first, 50) == 50
    first.exchange(store.rates)
    clock.now += 60
    assert passed(first, 30) == 30
    first.exchange(store.rates)
    # A gateway whose clock is behind neither adds to the new minute nor begins it again, and keeps its own count.
    assert passed(second, 40) == 40
    second.exchange(store.rates)
    assert passed(second, 40) == 10
    assert passed(first, 30) == 20


def test_while_the_store_is_away_each_counts_on_and_tells_it_later(store):
    first, second = limiter(50), limiter(50)
    assert passed(first, 20) == 20
    first.exchange(store.rates)
    assert passed(first, 10) == 10
    for _ in range(3):
        with pytest.raises(Away):
            first.exchange(Gone())
    assert passed(first, 5) == 5
    first.exchange(store.rates)
    passed(second, 1)
    second.exchange(store.rates)
    assert passed(second, 50) == 14
    # Nothing is told twice.
    first.exchange(store.rates)
    assert store.rates.add(100, {("a", "text-generation"): 0})["a", "text-generation"] == (100, 36)
