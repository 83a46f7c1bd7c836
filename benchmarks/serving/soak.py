"""The local stack under mixed traffic for as long as you like: no token lost or repeated, memory flat.

    python -m benchmarks soak [--minutes 30 | --streams 1000] [--clients 32] [--kill-gateway 60] [--json]

Clients ask greedy questions in a stream or at once, embed and rerank; one in five leaves in the middle. Every complete
answer must equal the one that the quiet server gave first, and every stream that ends by itself must be complete. With
``--kill-gateway S`` the gateway is killed every S seconds: streams then break (which is counted, not an error),
clients come back, and what they get must be right again. Memory is the proportional set size of all processes, looked
at ten times: shared memory (the object store, with the pool in it) apart, since that fills up to its limit before
it is flat; and beside it how many engine workers there were, since autoscaling starts more under load. Starts and ends
its own server, or takes the one with ``--home``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checks import Checks
from benchmarks.serving.processes import SHARED, descendants, memory_mib, running
from benchmarks.serving.stack import local_stack
from benchmarks.serving.startup import MODEL

QUESTIONS = [
    f"What does {name} do?" for name in ("itertools.chain", "math.sqrt", "json.dumps", "os.path.join", "re.sub")
]
EMBED = "@cf/sentence-transformers/all-minilm-l6-v2"
RERANK = "@cf/pico/pico-reranker"
LEAVES = 0.2


class Soak:
    def __init__(self, url: str, key: str, seed: int, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._run = f"{url}/client/v4/accounts/local/ai/run"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.checks = Checks()
        self.kills = 0
        self._expected: dict[str, Any] = {}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(headers=self._headers, timeout=120, limits=httpx.Limits(max_connections=500))

    async def learn(self, client: httpx.AsyncClient) -> None:
        """What each request is answered while nothing else runs."""
        for question in QUESTIONS:
            for tokens in self._tokens:
                body = self._chat(question, tokens)
                self._expected[json.dumps(body)] = (await self._ask(client, MODEL, body))["response"]
        for model, body in self._others():
            self._expected[json.dumps(body)] = await self._ask(client, model, body)

    async def client_loop(self, client: httpx.AsyncClient, go_on: Any) -> None:
        while go_on():
            kind = self._random.random()
            try:
                if kind < 0.15:
                    model, body = self._random.choice(self._others())
                    self._check(body, await self._ask(client, model, body), "unary")
                else:
                    body = self._chat(self._random.choice(QUESTIONS), self._random.choice(self._tokens))
                    if kind < 0.3:
                        self._check(body, (await self._ask(client, MODEL, body))["response"], "unary")
                    else:
                        await self._stream(client, body)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
                self._broken(f"refused {status}" if status else "broken connection")
                await asyncio.sleep(0.2)

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        leave_after = self._random.randrange(1, 20) if self._random.random() < LEAVES else None
        text, finished, failed, frames = "", False, False, 0
        try:
            async with client.stream("POST", f"{self._run}/{MODEL}", json={**body, "stream": True}) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        finished = True
                    elif line.startswith("data: "):
                        frame = json.loads(line[6:])
                        failed = failed or "errors" in frame
                        text += frame.get("response") or ""
                        frames += 1
                        if leave_after is not None and frames >= leave_after:
                            self.counts["left"] += 1
                            self._check_part(body, text)
                            return
        except httpx.TransportError:
            self._check_part(body, text)
            raise
        if failed:
            self._broken("honest error")
        elif not finished:
            self._broken("broken connection")
            self._check_part(body, text)
        else:
            self._check(body, text, "stream")

    def _broken(self, what: str) -> None:
        """What may happen where gateways are killed, and is an error where nothing is."""
        self.counts[what] += 1
        if not self.kills:
            self.checks.add("without a kill", what)

    async def _ask(self, client: httpx.AsyncClient, model: str, body: dict[str, Any]) -> Any:
        answer = await client.post(f"{self._run}/{model}", json=body)
        answer.raise_for_status()
        return answer.json()["result"]

    def _check(self, body: dict[str, Any], got: Any, kind: str) -> None:
        self.counts[kind] += 1
        if not _same(got, self._expected[json.dumps(body)]):
            self.counts["WRONG"] += 1
            self.checks.add(kind, f"{str(got)[:200]!r} to {json.dumps(body)}")
        else:
            self.checks.right += 1

    def _check_part(self, body: dict[str, Any], got: str) -> None:
        """What had come of a stream that did not end must be the beginning of the whole."""
        if not self._expected[json.dumps(body)].startswith(got):
            self.counts["WRONG"] += 1
            self.checks.add("a part of a stream", f"{got[:200]!r} to {json.dumps(body)}")

    @staticmethod
    def _chat(question: str, tokens: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}

    @staticmethod
    def _others() -> list[tuple[str, dict[str, Any]]]:
        contexts = [{"text": "Return the square root of x."}, {"text": "Join two paths."}]
        return [(EMBED, {"text": ["a sentence", "another"]}), (RERANK, {"query": "square root", "contexts": contexts})]


def _same(got: Any, want: Any) -> bool:
    """Equal; numbers may differ by rounding, since what shares a batch differs."""
    if isinstance(want, float) and isinstance(got, float):
        return abs(got - want) < 1e-3
    if isinstance(want, list) and isinstance(got, list):
        return len(got) == len(want) and all(map(_same, got, want))
    if isinstance(want, dict) and isinstance(got, dict):
        return got.keys() == want.keys() and all(_same(got[k], want[k]) for k in want if k != "usage")
    return got == want


def kill_gateway(server: int) -> bool:
    """Kills the gateway replica's process among the server's descendants."""
    for pid in descendants(server):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::ServeReplica:gateway"):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


async def soak(options: argparse.Namespace, url: str, key: str, server: int) -> dict[str, Any]:
    run = Soak(url, key, options.seed, tuple(int(n) for n in options.tokens.split(",")))
    async with run.client() as client:
        await run.learn(client)
        started = time.monotonic()
        limit = options.minutes * 60
        memory: list[dict[str, int]] = []
        workers: list[int] = []

        def share() -> float:
            if options.streams:
                return (run.counts["stream"] + run.counts["left"]) / options.streams
            return (time.monotonic() - started) / limit

        clients = [asyncio.ensure_future(run.client_loop(client, lambda: share() < 1)) for _ in range(options.clients)]
        next_kill = options.kill_gateway
        said = 0.0
        while not all(c.done() for c in clients):
            await asyncio.sleep(0.5)
            if options.kill_gateway and share() < 0.9 and time.monotonic() - started > next_kill:
                run.kills += kill_gateway(server)
                next_kill += options.kill_gateway
            if share() - said >= 0.1:
                said = share()
                memory.append(await asyncio.to_thread(_memory, server))
                workers.append((await asyncio.to_thread(running, server))["ray::EngineWorker"])
                own = sum(memory[-1].values()) - memory[-1][SHARED]
                shown = {"own": own, SHARED: memory[-1][SHARED], "engine workers": workers[-1]}
                print(f"  {100 * said:3.0f} %  {dict(run.counts)}  MiB: {shown}", file=sys.stderr, flush=True)
        await asyncio.gather(*clients)
        memory.append(await asyncio.to_thread(_memory, server))
        workers.append(running(server)["ray::EngineWorker"])
    seconds = time.monotonic() - started
    return {
        "benchmark": "soak",
        "seconds": round(seconds, 1),
        "counts": dict(run.counts),
        "wrong": run.checks.wrong.total(),
        "problems": run.checks.wrong.most_common(5),
        "gateway_kills": run.kills,
        "own_memory_mib": [sum(m.values()) - m[SHARED] for m in memory],
        "engine_workers": workers,
        "shared_memory_mib": [m[SHARED] for m in memory],
        "memory_by_process_mib": {name: [m.get(name, 0) for m in memory] for name in sorted(set().union(*memory))},
    }


def _memory(server: int) -> dict[str, int]:
    return {name: round(mib) for name, mib in memory_mib(server).items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--streams", type=int, default=0, help="end after this many streams instead")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kill-gateway", type=float, default=0, metavar="S", help="kill it every S seconds")
    parser.add_argument("--tokens", default="8,48,200", help="lengths of answers")
    parser.add_argument("--port", type=int, default=8124)
    parser.add_argument("--home", type=Path, help="measure the server that runs with this state directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    with local_stack(options.port, options.home) as stack:
        found = asyncio.run(soak(options, stack.url, stack.key, stack.pid))
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.json:
        print(json.dumps(found))
    if not found["counts"].get("stream"):
        raise SystemExit("no stream has been complete")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
