"""Gateways are killed under traffic: what clients were told and what the ledger says agree, entry by entry."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from benchmarks.chaos.asks import Ask
from benchmarks.chaos.clients import Clients
from benchmarks.chaos.dialects import CHAT as CHATS
from benchmarks.chaos.dialects import MESSAGES, NATIVE, RESPONSES
from benchmarks.chaos.weather import BROKEN, REFUSED, Weather
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger
from tests.tasks.conftest import KEY
from tests.tasks.test_settle import CHAT

WORDS = "one two three four five six seven eight nine ten"
MODEL = {"model": CHAT, "messages": [{"role": "user", "content": WORDS}]}
USAGE = {"stream_options": {"include_usage": True}}
ASKS = [
    Ask("chat", "/v1/chat/completions", CHATS, {**MODEL, **USAGE}),
    Ask("two", "/v1/completions", CHATS, {"model": CHAT, "prompt": ["one two", WORDS], **USAGE}),
    Ask("responses", "/v1/responses", RESPONSES, {"model": CHAT, "input": WORDS}),
    Ask("messages", "/v1/messages", MESSAGES, {**MODEL, "max_tokens": 64}),
    Ask("native", f"/client/v4/accounts/local/ai/run/{CHAT}", NATIVE, {"prompt": WORDS}),
    Ask("resumable", "/v1/chat/completions", CHATS, {**MODEL, **USAGE, "options": {"resumable": 60}}),
]
KILLS = 4


@pytest.mark.slow
async def test_what_clients_were_told_is_in_the_ledger(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dice, weather = random.Random(5), Weather()
    clients = Clients(f"http://127.0.0.1:{port}", KEY, weather)
    clients._asks = ASKS
    ends = False

    async def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.gateway.killed", str(tmp_path), str(port)]
        process = subprocess.Popen(command, env=os.environ)
        async with asyncio.timeout(120):
            while True:
                try:
                    await clients.http.get("/ping")
                    return process
                except httpx.TransportError:
                    assert process.poll() is None
                    await asyncio.sleep(0.05)

    process = await start()
    try:
        await clients.learn()
        traffic = [asyncio.ensure_future(clients.loop(random.Random(n), lambda: not ends)) for n in range(8)]
        for _ in range(KILLS):
            await asyncio.sleep(dice.uniform(0.2, 0.8))
            weather.begin("gateway-killed", frozenset({REFUSED, BROKEN}))
            process.kill()
            process.wait()
            process = await start()
        await asyncio.sleep(1.0)
        ends = True
        await asyncio.gather(*traffic)
        with SqlStore(tmp_path) as store:
            entries = await asyncio.to_thread(clients.receipts.check, store, weather, alone=True)
            with store.database.reading() as connection:
                broken = connection.execute(sa.select(ledger).where(ledger.c.status == "failed")).all()
    finally:
        process.kill()
        process.wait()
        await clients.http.aclose()
    assert not weather.broke and not clients.counts["WRONG"]
    assert entries > 50 and clients.counts["streams"] > 20 and clients.counts["whole answers"] > 5, clients.counts
    assert clients.counts["broken connections"] >= KILLS, clients.counts
    # Streams that do not resume have been charged for as far as they had come.
    assert broken
