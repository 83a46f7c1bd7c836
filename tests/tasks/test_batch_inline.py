"""Large inputs that come whole in one body."""

from __future__ import annotations

import asyncio
import errno
import os
import threading

import orjson
import pytest

from serve_app.batch.intake import Intake
from tests.tasks.conftest import ACCOUNT
from tests.tasks.test_batch_apis import echo, requests
from tests.waiting import until

__all__ = ["echo"]


@pytest.mark.parametrize("door", ["workers-ai", "anthropic"])
async def test_ten_megabytes_are_looked_through_once_while_others_are_answered(echo, monkeypatch, door):
    count, taken, others = 1900, list[int](), threading.Event()
    take, packed = Intake.take, {"prompt": "word " * 1000}

    def held(intake: Intake, number: int, raw: bytes | None) -> None:
        assert number != count // 2 or others.wait(60)
        taken.append(number)
        take(intake, number, raw)

    monkeypatch.setattr(Intake, "take", held)
    path, rows = f"{ACCOUNT}/run/{echo.model}?queueRequest=true", [{**packed, "seed": n} for n in range(count)]
    if door == "anthropic":
        params = {"model": echo.model, "max_tokens": 9, "messages": [{"role": "user", "content": packed["prompt"]}]}
        path, rows = "/v1/messages/batches", [{"custom_id": f"r{n}", "params": params} for n in range(count)]
    body = orjson.dumps({"requests": rows})
    assert 9_000_000 < len(body) < 10_000_000
    sent = asyncio.ensure_future(echo.http.post(path, content=body))
    await until(lambda: len(taken) == count // 2)
    assert (await echo.http.get(f"{ACCOUNT}/batches")).json()["result"] == []
    others.set()
    told = (await sent).json()
    batch_id = told["result"]["request_id"] if door == "workers-ai" else told["id"].removeprefix("msgbatch_")
    assert taken == list(range(count))
    assert sorted(r.number for r in await requests(echo, batch_id)) == taken
    # The input, and shards of as much as one runner claims.
    shards = await asyncio.to_thread(echo.gateway.state.batches.shards, batch_id)
    assert len(echo.gateway.state.files.list("batches/")) == len(shards) + 1 < 20


async def test_too_many_requests_are_refused_before_any_is_read(echo, monkeypatch):
    monkeypatch.setattr(Intake, "take", None)
    run = f"{ACCOUNT}/run/{echo.model}?queueRequest=true"
    refused = await echo.http.post(run, content=b'{"requests":[' + b"{}," * 2000 + b"{}]}")
    assert refused.status_code == 400 and "at most 2000 requests" in refused.json()["errors"][0]["message"]


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
async def test_a_submission_that_finds_the_disk_full_can_be_sent_again(echo, monkeypatch, reason):
    files, put = echo.gateway.state.files, echo.gateway.state.files.put

    def full(name: str, data: object) -> int:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(files, "put", full)
    path, body = f"{ACCOUNT}/run/{echo.model}?queueRequest=true", {"requests": [{"prompt": "Hi"}]}
    refused = await echo.http.post(path, json=body)
    assert refused.status_code == 503 and refused.json()["errors"][0]["code"] == 3040, refused.text
    assert int(refused.headers["retry-after"]) > 0
    monkeypatch.setattr(files, "put", put)
    assert (await echo.http.post(path, json=body)).json()["success"]
