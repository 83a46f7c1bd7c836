"""How long a gateway takes for inputs of 10 MB that come whole in one body, and for refusing those that are wrong.

The gateway is in this process with its store, and no model: what is measured is reading, checking, ordering, cutting
and writing. ``cpu``: processor time of the whole process, whatever else the machine does; ``held``: for how long its
event loop, on which everybody's tokens travel, was not asked for anything else.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.batch.files import text
from benchmarks.checks import Checks

MODEL = "@cf/pico/pico-instruct"
MOST_S = 1.0
BYTES, LIMIT = 9_900_000, 10_000_000
ROUNDS = 3
KEY, ACCOUNT = "a key of this benchmark", "local"
# Words of a prompt: of many requests, of few, and of very few.
SIZES = {"short": 30, "medium": 300, "long": 6000}


def inline(size: int, checks: Checks) -> dict[str, Any]:
    """Seconds from a body of ``size`` bytes to its answer, by API and length of requests: the best of some."""
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as home:
        return asyncio.run(_measured(Path(home), size, checks))


async def _measured(home: Path, size: int, checks: Checks) -> dict[str, Any]:
    from serve_app.gateway.core import Gateway
    from serve_app.gateway.http.app import build_http
    from serve_app.gateway.settings import GatewaySettings
    from serve_app.state.callers.accounts import hash_key

    async def nobody(*_: Any) -> Any:
        raise AssertionError("no model is asked for anything")

    settings = GatewaySettings("local", (hash_key(KEY),), "a secret", str(home), ACCOUNT, models=(MODEL,))
    gateway = Gateway(settings, nobody)
    found: dict[str, Any] = {"megabytes": round(size / 1e6, 1)}
    try:
        transport = httpx.ASGITransport(app=build_http(gateway))
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers, timeout=120) as http:
            for door, make in DOORS.items():
                for length, words in SIZES.items():
                    sides = [await _one(http, *make(size, words, seed), checks) for seed in range(ROUNDS)]
                    wall, cpu, held, requests = min(sides)
                    found[f"{door}_{length}"] = {
                        "requests": requests, "s": round(wall, 3), "cpu_s": round(cpu, 3), "held_s": round(held, 3)
                    }  # fmt: skip
            for what, (path, body, status) in _wrong(size).items():
                began = time.perf_counter()
                answer = await http.post(path, content=body)
                checks.equal(f"status of {what}", answer.status_code, status)
                found[what] = {"s": round(time.perf_counter() - began, 3)}
    finally:
        gateway.close()
    return found | {"most_s": max(one["s"] for one in found.values() if isinstance(one, dict))}


async def _one(
    http: httpx.AsyncClient, path: str, body: bytes, requests: int, counted: Callable[[Any], int], checks: Checks
) -> tuple[float, float, float, int]:
    gaps, over = [0.0], asyncio.Event()

    async def ticks() -> None:
        last = time.perf_counter()
        while not over.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.ensure_future(ticks())
    began, cpu = time.perf_counter(), time.process_time()
    answer = await http.post(path, content=body)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    over.set()
    await ticking
    if checks.equal(f"status of {path}", answer.status_code, 200):
        told = answer.json()
        if "request_id" in told.get("result", {}):
            told = (await http.get(f"{API}/batches/{told['result']['request_id']}")).json()["result"]
        checks.equal("requests of the batch", counted(told), requests)
    return wall, cpu, max(gaps), requests


API = f"/client/v4/accounts/{ACCOUNT}/ai"


def _bodies(size: int, words: int, seed: int, around: int) -> list[str]:
    rng, listed, length = random.Random(seed), list[str](), 0
    while True:
        asked = text(rng, words)
        length += len(asked) + around
        if length > size:
            return listed
        listed.append(asked)


def _native(size: int, words: int, seed: int) -> tuple[str, bytes, int, Callable[[Any], int]]:
    rows = [{"prompt": asked, "max_tokens": 16} for asked in _bodies(size, words, seed, 33)]
    body = json.dumps({"requests": rows}, separators=(",", ":")).encode()
    return f"{API}/run/{MODEL}?queueRequest=true", body, len(rows), lambda told: told["requests"]["total"]


def _anthropic(size: int, words: int, seed: int) -> tuple[str, bytes, int, Callable[[Any], int]]:
    rows = [
        {
            "custom_id": f"r{number}",
            "params": {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": asked}]},
        }
        for number, asked in enumerate(_bodies(size, words, seed, 140))
    ]
    body = json.dumps({"requests": rows}, separators=(",", ":")).encode()
    return "/v1/messages/batches", body, len(rows), lambda told: sum(told["request_counts"].values())


DOORS = {"native": _native, "anthropic": _anthropic}


def _wrong(size: int) -> dict[str, tuple[str, bytes, int]]:
    """What is refused: a body of which nothing can be run, a broken one, one request that is too long, too many, and
    more than 10 MB.
    """
    run = f"{API}/run/{MODEL}?queueRequest=true"
    row = b'{"prompt":"' + b"x" * 180 + b'","temperature":9},'
    none = b'{"requests":[' + (row * (size // len(row)))[:-1] + b"]}"
    return {
        "all_wrong": (run, none, 400),
        "broken": (run, none[:-2], 400),
        "too_many": (run, b'{"requests":[' + b"{}," * 60_000 + b"{}]}", 400),
        "too_large": (run, b'{"requests":[{"prompt":"' + b"x" * LIMIT + b'"}]}', 413),
    }
