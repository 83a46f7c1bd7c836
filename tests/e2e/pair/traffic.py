"""Mixed traffic whose answers are known, and what is left of it when it has ended: at gateways and in the ledger."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import sqlalchemy as sa

from benchmarks.chaos.ledger import sums_problem
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.state.spending.ledger import Entry
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger
from serve_app.text.tokenizer import Tokenizer
from tests.e2e.pair.client import Client, body, prompt
from tests.e2e.pair.deployment import Pair
from tests.tiny import load_reference, reference_tokens

TOKENS = 60  # of each answer
# Prompts are of two families that share a beginning each, of more than a chunk of K/V. So many answers after the first
# ones there is another one, which no worker has seen.
SHARED, TAIL, FIRST, EVERY = 300, 70, 4, 10


@dataclass(frozen=True)
class Ask:
    body: dict[str, Any]
    input_tokens: int
    text: str


def known_asks(model: str, seeds: range) -> list[Ask]:
    """With greedy answers as transformers gives them."""
    folder = PROJECT_ROOT / "checkpoints" / "pico-instruct"
    tokenizer, reference = Tokenizer(folder), load_reference(folder)
    found = []
    for seed in seeds:
        written = f"{prompt(9000 + seed % 2, SHARED)} {prompt(seed, TAIL)}"
        ids = [int(token) for token in tokenizer.encode(written)]
        # The end of the text is forbidden, as by the bias of `body`.
        answer = reference_tokens(reference, ids, TOKENS, min_new_tokens=TOKENS)
        found.append(Ask(body(0, TOKENS, model=model, prompt=written), len(ids), tokenizer.decode(answer)))
    return found


@dataclass
class Traffic:
    """Clients that ask one after the other until they are told to stop. Every answer is compared."""

    client: Client
    asks: list[Ask]
    gateways: list[str]
    # The gateway that may be lost: what is under way there may break, and shows the beginning of its answer by then.
    may_break: str = ""
    ended: dict[str, Ask] = field(default_factory=dict)  # by id
    broken: Counter[str] = field(default_factory=Counter)  # by id, "" where that is not known
    counts: Counter[str] = field(default_factory=Counter)
    streaming: int = 0  # that have begun and not ended
    over: bool = False

    async def ask_again_and_again(self, number: int) -> None:
        draw = random.Random(number)
        while not self.over:
            known = self.asks[: FIRST + self.answers // EVERY]
            ask, gateway = draw.choice(known), draw.choice(self.gateways)
            kind = draw.choice(["whole", "session", "stream", "stream", "resumable"])
            seen: list[str] = []
            try:
                if kind == "stream":
                    await self._stream(gateway, ask, seen)
                elif kind == "resumable":
                    # Wherever it began, it goes on where there is a gateway.
                    ways = [gateway, *(one for one in self.gateways if one != gateway)]
                    text, lost = await self.client.resumed(ways, ask.body, asyncio.Event())
                    assert text == ask.text
                    self.counts["gone on"] += lost
                else:
                    await self._whole(gateway, ask, seen, session=kind == "session")
            except httpx.TransportError:
                assert gateway == self.may_break, f"{kind} at {gateway}"
                self.broken[seen[0] if seen else ""] += 1
                assert ask.text.startswith("".join(seen[1:]))
                await asyncio.sleep(0.05)
                continue
            self.counts[kind] += 1

    async def _whole(self, gateway: str, ask: Ask, seen: list[str], *, session: bool) -> None:
        headers = {"x-session-affinity": f"session {self.asks.index(ask)}"} if session else {}
        answer = await self.client.ask(gateway, ask.body, **headers)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["choices"][0]["text"] == ask.text
        assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (ask.input_tokens, TOKENS)
        self._end(answer.headers["cf-ray"], ask)

    async def _stream(self, gateway: str, ask: Ask, seen: list[str]) -> None:
        """``seen``: its id, then its parts."""
        url, asked = f"{gateway}/v1/completions", {**ask.body, "stream": True}
        begun, complete = False, False
        try:
            async with self.client.http.stream("POST", url, json=asked) as answer:
                assert answer.status_code == 200, await answer.aread()
                seen.append(answer.headers["cf-ray"])
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        complete = True
                    elif line.startswith("data: "):
                        frame = json.loads(line[6:])
                        assert "error" not in frame, frame
                        seen += [choice["text"] for choice in frame["choices"]]
                        self.streaming += not begun
                        begun = True
        finally:
            self.streaming -= begun
        if not complete and gateway == self.may_break:
            raise httpx.RemoteProtocolError("cut")
        assert complete and "".join(seen[1:]) == ask.text
        self._end(seen[0], ask)

    def _end(self, request: str, ask: Ask) -> None:
        assert request not in self.ended
        self.ended[request] = ask

    @property
    def answers(self) -> int:
        return sum(self.counts[kind] for kind in ("whole", "session", "stream", "resumable"))


def entries(pair: Pair) -> list[Entry]:
    with SqlStore(pair.home) as store, store.database.reading() as connection:
        chosen = sa.select(ledger).where(ledger.c.model == pair.shape.model)
        return [Entry.of(dict(row)) for row in connection.execute(chosen).mappings()]


def ledger_problem(pair: Pair, traffic: Traffic, before: set[str]) -> str | None:
    """What is wrong with the entries of the traffic; ``before``: ids of others."""
    found = [entry for entry in entries(pair) if entry.id not in before]
    by_id = {entry.id: entry for entry in found}
    for request, ask in traffic.ended.items():
        entry = by_id.pop(request, None)
        if entry is None or entry.status != "done":
            return f"the entry of a complete answer is {entry}"
        if (entry.units["input_tokens"], entry.units["output_tokens"]) != (ask.input_tokens, TOKENS):
            return f"{entry} is not what its client was told"
    for request in traffic.client.resumable:
        entry = by_id.pop(request, None)
        if entry is None or (entry.status, entry.units["output_tokens"]) != ("done", TOKENS):
            return f"the entry of a stream that was resumed or could have been is {entry}"
    for request in traffic.broken:
        by_id.pop(request, None)
    # Of those whose connection broke before their first byte nobody knows the id.
    if len(by_id) > traffic.broken[""] + traffic.client.nameless:
        return f"nobody has asked for {list(by_id.values())}"
    with SqlStore(pair.home) as store:
        return sums_problem(store)


def held(told: dict[str, Any]) -> dict[str, Any]:
    """What is not 0 of all that counts work under way, as one gateway tells it."""
    routing = told["routing"]
    counts = {
        "inflight": told["inflight"],
        "waiting": sum(routing["waiting"].values()),
        "waiting tokens": routing["waiting_tokens"],
        "prefill in flight": routing["prefill_tokens_in_flight"],
        "decode in flight": routing["decode_tokens_in_flight"],
    }
    for worker in routing["workers"]:
        for name in ("queued_tokens", "running", "waiting", "batch", "kv_use"):
            counts[f"{name} of {worker['replica']}"] = worker[name]
    for worker in told["workers"]:
        for name in ("running", "waiting", "used_blocks"):
            counts[f"{name} of {worker['stage']} {worker['pid']}"] = worker[name]
    return {name: count for name, count in counts.items() if count}


def metrics(pair: Pair, gateway: str) -> dict[str, float]:
    """Sums of the model's series by their names, as one gateway exposes those of all."""
    answer = httpx.get(f"{gateway}/metrics", headers=pair.headers, timeout=120)
    assert answer.status_code == 200, answer.text
    found: Counter[str] = Counter()
    for line in answer.text.splitlines():
        if f'"{pair.shape.model}"' in line and not line.startswith("#"):
            name, value = line.partition("{")[0], line.rpartition("}")[2].split()[0]
            found[name] += float(value)
    return dict(found)
