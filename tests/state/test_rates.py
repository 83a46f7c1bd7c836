"""Requests per minute: the numbers in the headers, the refusal, and one count for all gateways."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.api.errors import RateLimited
from serve_app.state.rates import RateLimiter

LIMITS = {"text-generation": 3}


def test_counts_refuses_and_starts_again(tmp_path: Path):
    now = [6000.0]
    limiter = RateLimiter(tmp_path / "r.sqlite3", LIMITS, lambda: now[0])
    assert limiter.take("a", "text-generation") == {
        "Ratelimit": '"text-generation";r=2;t=60',
        "Ratelimit-Policy": '"text-generation";q=3;w=60',
    }
    now[0] += 59.5
    limiter.take("a", "text-generation")
    assert limiter.take("a", "text-generation")["Ratelimit"].endswith("r=0;t=1")
    for _ in range(2):
        with pytest.raises(RateLimited) as caught:
            limiter.take("a", "text-generation")
    error = caught.value
    assert (error.code, error.status) == (971, 429)
    assert error.headers["Retry-After"] == "1" and error.headers["Ratelimit"] == '"text-generation";r=0;t=1'
    # Another account has its own count, another task none at all.
    assert "r=2" in limiter.take("b", "text-generation")["Ratelimit"]
    assert limiter.take("a", "reranking") == {}
    now[0] += 1
    assert "r=2" in limiter.take("a", "text-generation")["Ratelimit"]


def test_without_limits_there_is_no_file(tmp_path: Path):
    limiter = RateLimiter(tmp_path / "r.sqlite3", {})
    assert limiter.take("a", "text-generation") == {} and not list(tmp_path.iterdir())


def test_gateways_share_one_count(tmp_path: Path):
    def gateway(_: int) -> int:
        limiter = RateLimiter(tmp_path / "r.sqlite3", {"text-generation": 50}, lambda: 6000.0)
        passed = 0
        for _ in range(25):
            try:
                limiter.take("a", "text-generation")
                passed += 1
            except RateLimited:
                pass
        limiter.close()
        return passed

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(gateway, range(4))) == 50
