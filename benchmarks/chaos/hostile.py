"""Honest clients beside slow and hostile ones: every honest answer is right and comes, and how long it takes.

    python -m benchmarks hostile [--seconds 15] [--attacks half-headers,slow-bodies] [--json]

Starts a server. Four honest clients ask for a short stream again and again, whose text is known, alone and then beside
each attack: half-sent headers, bodies that trickle, streams that nobody reads, bodies of 64 MiB, JSON of 10 MB that is
looked through and refused, and idle connections, up to thousands at a time and from one address. Attacks that need a
key have one of another account. Honest clients come from another address of the loopback, since one address gets half
of the connections at most. Ends with status 1 where an honest client got no answer, or a wrong one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import resource
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.chaos.asks import asks
from benchmarks.chaos.chaos import own_target
from benchmarks.chaos.dialects import Seen
from benchmarks.serving.startup import MODEL
from serve_app.state.store.sql import SqlStore

HONEST = 4
HONEST_FROM = "127.0.0.2"
PATIENCE_S = 60.0
Address = tuple[str, int]
_PATH = f"/client/v4/accounts/hostile/ai/run/{MODEL}"


# -- the attacks: each is one connection, and is made again when it ends ----------------------------------------------


async def _half_headers(address: Address, key: str) -> None:
    reader, writer = await _connect(address)
    with contextlib.closing(writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n")
        while not reader.at_eof():
            writer.write(b"x: y\r\n")
            await writer.drain()
            await _read_for(reader, 2.0)


async def _slow_body(address: Address, key: str) -> None:
    reader, writer = await _connect(address)
    with contextlib.closing(writer):
        writer.write(_head(key, 500_000) + b'{"prompt": "')
        while not reader.at_eof():
            writer.write(b"x" * 50)
            await writer.drain()
            await _read_for(reader, 0.5)


async def _no_reader(address: Address, key: str) -> None:
    body = json.dumps({"prompt": "Write on.", "raw": True, "ignore_eos": True, "max_tokens": 2000, "stream": True})
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.setblocking(False)
    with made:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(made, address)
        await loop.sock_sendall(made, _head(key, len(body)) + body.encode())
        await asyncio.sleep(3600)


async def _huge_body(address: Address, key: str) -> None:
    reader, writer = await _connect(address)
    with contextlib.closing(writer):
        writer.write(_head(key, 64 << 20))
        for _ in range(64):
            if reader.at_eof():
                break
            writer.write(b"x" * (1 << 20))
            await writer.drain()
        await _read_for(reader, 1.0)


async def _large_json(address: Address, key: str) -> None:
    body = b'{"messages": [%s]}' % b", ".join([b'{"role": "user", "content": "one two"}'] * 250_000)
    reader, writer = await _connect(address)
    with contextlib.closing(writer):
        writer.write(_head(key, len(body)) + body)
        await writer.drain()
        await _read_for(reader, 30.0)


async def _idle(address: Address, key: str) -> None:
    reader, writer = await _connect(address)
    with contextlib.closing(writer):
        await reader.read()


Attack = Callable[[Address, str], Awaitable[None]]
# How many connections at a time. Streams that nobody reads take half of one decode worker's slots: all of them would
# be another question, namely how long others wait for the end of long streams.
ATTACKS: dict[str, tuple[Attack, int]] = {
    "half-headers": (_half_headers, 4000),
    "slow-bodies": (_slow_body, 500),
    "no-readers": (_no_reader, 64),
    "huge-bodies": (_huge_body, 16),
    "large-json": (_large_json, 8),
    "idle-connections": (_idle, 9000),
}


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address)


async def _read_for(reader: asyncio.StreamReader, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await reader.read(4096)


def _head(key: str, length: int) -> bytes:
    lines = [f"POST {_PATH} HTTP/1.1", "Host: here", f"Authorization: Bearer {key}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def attack(name: str, url: str, key: str) -> None:
    """Until the process is ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    parts, (one, count) = urlsplit(url), ATTACKS[name]
    address = (parts.hostname or "127.0.0.1", parts.port or 80)

    async def again() -> None:
        await asyncio.sleep(random.uniform(0, 2))
        while True:
            with contextlib.suppress(OSError):
                await one(address, key)
            await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        await asyncio.gather(*(again() for _ in range(count)))

    asyncio.run(all_of_them())


# -- honest clients --------------------------------------------------------------------------------------------------


async def honest(url: str, key: str, seconds: float, wanted: Seen | None) -> tuple[list[float], list[str], Seen | None]:
    """Seconds of each answer, what was wrong, and an answer."""
    ask = next(ask for ask in asks() if ask.name == "openai chat")
    until, took, wrong = time.monotonic() + seconds, [], []
    last: Seen | None = None
    transport = httpx.AsyncHTTPTransport(local_address=HONEST_FROM)
    headers = {"Authorization": f"Bearer {key}"}

    async def client() -> None:
        nonlocal last
        while time.monotonic() < until:
            # A new connection each: it must get in, too.
            fresh = {**headers, "Connection": "close"}
            began, seen = time.monotonic(), Seen()
            try:
                async with http.stream("POST", ask.path, json={**ask.body, "stream": True}, headers=fresh) as answer:
                    if answer.is_error:
                        await answer.aread()
                        wrong.append(f"status {answer.status_code}: {answer.text[:200]}")
                        continue
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            ask.dialect.event(seen, json.loads(line[6:]))
                        seen.finished = seen.finished or line == "data: [DONE]"
            except httpx.HTTPError as error:
                wrong.append(repr(error))
                continue
            took.append(time.monotonic() - began)
            if not seen.finished or (wanted is not None and seen.texts != wanted.texts):
                wrong.append(f"the text is {seen.texts}")
            last = seen

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, transport=transport) as http:
        await asyncio.gather(*(client() for _ in range(HONEST)))
    return took, wrong, last


def measure(options: argparse.Namespace) -> dict[str, Any]:
    left: list[str] = []
    rows: dict[str, Any] = {}
    with own_target(options, left) as target:
        with SqlStore(target.home, options.database) as store:
            other = store.accounts.add("hostile")
        asyncio.run(honest(target.url, target.key, 3.0, None))
        for name in ["alone", *options.attacks]:
            process = None
            if name != "alone":
                process = multiprocessing.get_context("spawn").Process(target=attack, args=(name, target.url, other))
                process.start()
                time.sleep(4.0)
            try:
                took, wrong, seen = asyncio.run(honest(target.url, target.key, options.seconds, options.wanted))
            finally:
                if process is not None:
                    process.kill()
                    process.join()
            options.wanted = options.wanted or seen
            rows[name] = _row(took, wrong)
            print(name, rows[name], flush=True)
            time.sleep(2.0)
    return {"benchmark": "hostile", "rows": rows, "left_behind": left}


def _row(took: list[float], wrong: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"answers": len(took), "wrong": len(wrong), "what": wrong[:3]}
    if len(took) > 1:
        found["median_s"] = round(statistics.median(took), 3)
        found["p99_s"] = round(statistics.quantiles(took, n=100)[98], 3)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--attacks", type=lambda text: text.split(","), default=list(ATTACKS))
    parser.add_argument("--port", type=int, default=8126)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv, argparse.Namespace(database=None, postgresql=False, gateways=1, wanted=None))
    if unknown := set(options.attacks) - set(ATTACKS):
        raise SystemExit(f"no such attack: {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    found = measure(options)
    if options.json:
        print(json.dumps(found))
    return 1 if found["left_behind"] or any(row["wrong"] or not row["answers"] for row in found["rows"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
