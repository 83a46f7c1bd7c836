"""Clients of the pair: requests, streams, and the paths that requests took."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import httpx

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.text.tokenizer import Tokenizer
from tests.e2e.conftest import eos_id
from tests.e2e.pair.deployment import MODEL

# No connection is kept: a server may close an idle one while a request is on its way, which only a proxy knows to mend.
LIMITS = httpx.Limits(max_connections=500, max_keepalive_connections=0)
WORDS = ("list", "dict", "set", "string", "int", "float", "path", "file", "line", "join", "split", "sort", "map")


def prompt(seed: int, tokens: int) -> str:
    """Text of exactly so many tokens, without special ones, that no other seed begins with."""
    tokenizer = Tokenizer(PROJECT_ROOT / "checkpoints" / "pico-instruct")
    draw = random.Random(seed)
    whole = [word for word in WORDS if len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1]
    written = f"{seed}:"
    while (length := len(tokenizer.encode(written))) < tokens:
        written += "".join(f" {draw.choice(whole)}" for _ in range(tokens - length))
    assert length == tokens
    return written


def body(n: int, tokens: int, **more) -> dict:
    """Without an end of its own, so that answers are as long as is asked for."""
    prompt = f"Number {n}: " + "say it again " * 6
    fixed = {"raw": True, "temperature": 0, "logit_bias": {eos_id(): -100}}
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, **fixed, **more}


class Client:
    """An account of the pair's, with a connection pool of its own."""

    def __init__(self, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(headers=headers, timeout=120, limits=LIMITS)
        self.done = 0
        # Ids of the streams of :meth:`resumed`, and how many more may have begun whose ids never came.
        self.resumable: list[str] = []
        self.nameless = 0

    async def ask(self, gateway: str, request: dict, **headers: str) -> httpx.Response:
        answer = await self.http.post(f"{gateway}/v1/completions", json=request, headers=headers)
        self.done += 1
        return answer

    async def stream(self, gateway: str, request: dict, begun: asyncio.Event | None = None) -> str:
        """The text of a whole stream; ``begun`` is set with its first token."""
        text, ended = "", False
        async with self.http.stream("POST", f"{gateway}/v1/completions", json={**request, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    frame = json.loads(line[6:])
                    assert "error" not in frame, frame
                    text += "".join(choice["text"] for choice in frame["choices"])
                    if begun is not None:
                        begun.set()
        assert ended, text
        return text

    async def resumed(self, gateways: list[str], request: dict, begun: asyncio.Event) -> tuple[str, int]:
        """The text of a stream that goes on at the next gateway wherever the one is lost, and how often that was
        in the middle of it; ``begun`` is set with its tenth frame.
        """
        text, stream_id, last, lost = "", "", 0, 0
        asked = {**request, "stream": True, "options": {"resumable": 120}}
        for turn in itertools.count():
            gateway = gateways[min(turn, len(gateways) - 1)]
            if stream_id:
                after = {"Last-Event-ID": str(last)}
                sent = self.http.stream("GET", f"{gateway}/v1/requests/{stream_id}/stream", headers=after)
            else:
                sent = self.http.stream("POST", f"{gateway}/v1/completions", json=asked)
            try:
                async with sent as answer:
                    assert answer.status_code == 200, await answer.aread()
                    if not stream_id:
                        stream_id = answer.headers["cf-ray"]
                        self.resumable.append(stream_id)
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            assert int(line[4:]) == last + 1
                            last += 1
                        elif line == "data: [DONE]":
                            return text, lost
                        elif line.startswith("data: "):
                            frame = json.loads(line[6:])
                            assert "error" not in frame, frame
                            text += "".join(choice["text"] for choice in frame["choices"])
                        if last >= 10:
                            begun.set()
            except httpx.TransportError:
                lost += bool(stream_id)
                self.nameless += not stream_id
        raise AssertionError("unreachable")

    async def found(self, url: str) -> dict:
        """What was made at one gateway, once another knows it: the store may take its time on a busy machine."""
        async with asyncio.timeout(60):
            while (answer := await self.http.get(url)).status_code == 404:
                await asyncio.sleep(0.05)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def path(self, gateway: str, answer: httpx.Response) -> dict[str, dict]:
        """Its events by name, once the call behind the answer has told where it has been."""
        return (await self._path(gateway, answer))[1]

    async def turn(self, gateway: str, answer: httpx.Response) -> tuple[float, float]:
        """When it came to its gateway and when it was sent to a worker, unix seconds."""
        assert answer.status_code == 200, answer.text
        created, events = await self._path(gateway, answer)
        return created, created + events["routed"]["ms"] / 1e3

    async def _path(self, gateway: str, answer: httpx.Response) -> tuple[float, dict[str, dict]]:
        async with asyncio.timeout(60):
            while True:
                found = await self.http.get(f"{gateway}/v1/requests/{answer.headers['cf-ray']}")
                if found.status_code != 404:  # another gateway's, and not written down yet
                    assert found.status_code == 200, found.text
                    events = {e["event"]: e for e in found.json()["events"]}
                    if found.json()["status"] != "running" and "decoded" in events:
                        return found.json()["created"], events
                await asyncio.sleep(0.05)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]
