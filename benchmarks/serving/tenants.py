"""Tenants of the fairness benchmark: clients with accounts of their own, and what became of their requests."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.checks import Checks
from serve_app.state.store.sql import SqlStore

MODEL = "@cf/pico/pico-instruct"
TOKENS = 48
END = "2"  # the end of an answer, in the pico models and the random ones
KEYS_READ_S = 30.0


@dataclass(slots=True)
class Tally:
    """Outcomes of one phase; seconds."""

    good: int = 0
    late: int = 0
    refused: list[float] = field(default_factory=list)
    refused_ids: list[str] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    answered_ids: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Tenant:
    def __init__(self, url: str, home: Path, name: str) -> None:
        self.name, self.checks = name, Checks()
        with SqlStore(home) as store:
            key = store.accounts.add(name)
        self.path = f"/client/v4/accounts/{name}/ai/run/{MODEL}"
        # Clients share the cores with the server, and httpx takes more of them than the gateway does.
        self.client = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(120),
            connector=aiohttp.TCPConnector(limit=400),
        )
        self._number = 0

    def body(self, **options: Any) -> dict[str, Any]:
        self._number += 1
        prompt = f"{time.time_ns()} {self._number}: " + "some words about Python " * 8
        return {
            "prompt": prompt, "raw": True, "max_tokens": TOKENS, "temperature": 0, "options": options,
            "logit_bias": {END: -100},
        }  # fmt: skip

    async def ask(self, tally: Tally, **options: Any) -> int:
        began = time.perf_counter()
        async with self.client.post(self.path, json=self.body(**options)) as answer:
            body = await answer.read()
        took = time.perf_counter() - began
        self.checks.add(f"a request of {self.name}", problem(answer.status, body))
        if answer.status == 200:
            tally.good += 1
            tally.finished.append(time.perf_counter())
            tally.latencies.append(took)
            tally.answered_ids.append(answer.headers["cf-ray"])
        elif answer.status == 429:
            tally.refused.append(took)
            tally.refused_ids.append(answer.headers["cf-ray"])
        else:
            tally.late += answer.status == 408
        return answer.status

    async def get(self, path: str, **headers: str) -> Any:
        async with self.client.get(path, headers=headers) as answer:
            return await answer.json()

    async def known(self) -> None:
        """Until the gateway has read the account's key."""
        until = time.monotonic() + KEYS_READ_S
        while time.monotonic() < until:
            async with self.client.get("/v1/models") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)
        raise SystemExit(f"no figures: the gateway does not take the key of {self.name}")


def problem(status: int, body: bytes) -> str | None:
    """An answer has all of its tokens, or is a refusal that says so; anything else is wrong.

    The text may be empty: a random model may repeat a control token.
    """
    if status in (408, 429):
        return None
    try:
        answer = json.loads(body)
        result = answer["result"]
        if status == 200 and result["usage"]["completion_tokens"] == TOKENS and isinstance(result["response"], str):
            return None
    except (ValueError, KeyError, TypeError):
        pass
    return f"status {status}: {body[:200]!r}"


async def closed(tenant: Tenant, streams: int, until: asyncio.Event, tally: Tally, **options: Any) -> None:
    """``streams`` clients that each ask again as soon as they are answered."""

    async def client() -> None:
        while not until.is_set():
            await tenant.ask(tally, **options)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    tally.seconds = time.perf_counter() - began


async def run_for(seconds: float, tenant: Tenant, streams: int, **options: Any) -> Tally:
    tally, end = Tally(), asyncio.Event()
    task = asyncio.create_task(closed(tenant, streams, end, tally, **options))
    await asyncio.sleep(seconds)
    end.set()
    await task
    return tally
