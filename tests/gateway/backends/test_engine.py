"""Requests of engine workers, whose calls are the test's and whose channel is the real one."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path as File

import numpy as np
import pytest

from serve_app.api.types import GenerateRequest, Usage
from serve_app.catalog.load import load_catalog
from serve_app.channel.inbox import TokenInbox
from serve_app.channel.sender import TokenSender
from serve_app.gateway.backends import attempts
from serve_app.gateway.backends.engine import EngineBackend
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.text_generation.task import generate
from serve_app.tasks.work import Runtime, Settled, Settlement
from serve_app.text.prompt import prompt_ids
from serve_app.wire.generate import (
    GenerateCall,
    Generated,
    GeneratedMany,
    GenerateMany,
    GenerateResult,
    PromptPath,
)
from serve_app.wire.load import LoadReport
from serve_app.wire.methods import Method
from serve_app.wire.tokens import Ending, TokenItem
from tests.waiting import until

CHAT = "@cf/pico/pico-instruct"
# What every worker writes: a token is its position.
ANSWER = list(range(300, 320))


@dataclass
class Replicas:
    """Serve and the workers: who is called what, and each worker's end of the channel."""

    inbox: TokenInbox
    senders: dict[str, TokenSender] = field(default_factory=dict)
    closed: list[tuple[str, str]] = field(default_factory=list)
    calls: list[tuple[str, str, GenerateCall]] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    # How many requests each call had that had several.
    together: list[int] = field(default_factory=list)
    cancelled: int = 0
    # Replicas whose calls wait for ever after so many tokens.
    stuck: dict[str, int] = field(default_factory=dict)
    engine: EngineBackend = None  # type: ignore[assignment]

    async def up(self, name: str, stage: str) -> None:
        sender = TokenSender(name, on_closed=lambda stream: self.closed.append((name, stream)))
        self.senders[name] = sender
        sender.subscribe(self.inbox.address, 60.0)
        sizes = {"max_seqs": 8, "total_blocks": 1000, "block_tokens": 32, "max_batch_tokens": 512}
        sender.report(LoadReport(name, CHAT, stage, stage, "n1", **sizes))
        await until(lambda: name in self.inbox.workers)

    async def under_way(self, produced: int) -> None:
        """Until a first call has been made, and so many of its tokens are here."""
        await until(lambda: self.calls)
        stream = self.inbox._streams[self.calls[0][2].id]
        await until(lambda: stream.next_offset >= produced)

    async def call(
        self, _: ServedModel, method: Method, call: GenerateCall | GenerateMany, stage: str, replica: str
    ) -> GenerateResult | GeneratedMany:
        if isinstance(call, GenerateMany):
            self.together.append(len(call.calls))
            return GeneratedMany(
                tuple(await asyncio.gather(*(self.generate(one, stage, replica, True) for one in call.calls)))
            )
        return await self.generate(call, stage, replica)

    async def generate(self, call: GenerateCall, stage: str, replica: str, tells: bool = False) -> Generated:
        self.calls.append((stage, replica, call))
        sender = self.senders[replica]
        sender.open(call.id, call.inbox, call.resumed)
        until = self.stuck.get(replica, len(ANSWER))
        for at in range(call.resumed, until):
            sender.send([TokenItem(call.id, at, (ANSWER[at],))])
            await asyncio.sleep(0)
        try:
            if until < len(ANSWER):
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        sender.send([TokenItem(call.id, until, (), "length")])
        ended = Generated("length", 0, PromptPath(), tuple(sender.undelivered(call.id)), replica)
        if tells:
            sender.ended(call.inbox, Ending(call.id, ended.encode()))
        return ended


@pytest.fixture
async def replicas(monkeypatch):
    monkeypatch.setattr(attempts, "BACK_WITHIN_S", 0.05)
    catalog = load_catalog()
    model = ServedModel(catalog[CHAT], catalog[CHAT].serving["local"], catalog.source(CHAT), File("/nonexistent"))

    def load(process: str, report: LoadReport | None) -> None:
        if report is None:
            engine.lost(model, process)
        else:
            engine.dispatcher(model).report(process, report)

    inbox = TokenInbox(on_load=load)
    await inbox.start()
    made = Replicas(inbox)
    engine = made.engine = EngineBackend(inbox, made.call)
    runtime = Runtime(
        made.call, lambda _: engine, Settlement(made.settled.append), 100, salt=lambda account: b"a tenant"
    )

    async def ask(n: int = 1) -> Usage:
        sampling = SamplingParams(max_tokens=len(ANSWER), temperature=0)
        request = GenerateRequest(CHAT, None, "one two", False, sampling, n=n)
        events, _ = await generate(runtime, model, request, Caller("a"))
        return [event async for event in events][-1]

    yield made, ask
    for sender in made.senders.values():
        await sender.aclose()
    await inbox.aclose()


def continued(call: GenerateCall, produced: int) -> bool:
    ids = np.frombuffer(call.ids, np.int32).tolist()
    return call.resumed == produced and (not produced or ids[-produced:] == ANSWER[:produced])


@pytest.mark.parametrize("produced", [0, 7])
async def test_what_waits_at_a_worker_that_has_gone_moves_to_one_that_can_answer(replicas, produced) -> None:
    """Its call says nothing: it stands in the queue of a stage without replicas."""
    made, ask = replicas
    made.stuck["d1"] = produced
    await made.up("d1", "decode")
    await made.up("p1", "prefill")
    asking = asyncio.ensure_future(ask())
    await made.under_way(produced)
    assert [call[:2] for call in made.calls] == [("decode", "d1")]
    await made.senders["d1"].aclose()
    usage = await asyncio.wait_for(asking, 60)
    assert [call[:2] for call in made.calls] == [("decode", "d1"), ("prefill", "p1")]
    assert usage.completion_tokens == len(ANSWER) and made.cancelled == 1
    first, second = (call[2] for call in made.calls)
    assert continued(second, produced) and first.id != second.id
    # The first attempt's worker may be alive after all: nobody reads what it says.
    late = made.senders["d1"] = TokenSender("d1", on_closed=lambda stream: made.closed.append(("d1", stream)))
    late.open(first.id, made.inbox.address, produced)
    late.send([TokenItem(first.id, produced, (1,))])
    await until(lambda: ("d1", first.id) in made.closed)


async def test_a_request_may_have_more_answers_than_a_worker_has_places(replicas) -> None:
    made, ask = replicas
    await made.up("d1", "decode")
    usage = await asyncio.wait_for(ask(n=128), 60)
    assert usage.completion_tokens == 128 * len(ANSWER) and usage.prompt_tokens < 20
    seeds = [call.sampling.seed for _, _, call in made.calls]
    assert len(seeds) == len(set(seeds)) == 128 and sum(made.together) >= 64
    # What is told of it: when it had a worker, that answers met their length, and how long one of them is.
    [settled] = made.settled
    assert 0 <= settled.queue_s <= settled.ttft_s <= settled.seconds
    assert settled.cut and settled.longest == len(ANSWER)


async def test_a_worker_that_only_lost_its_connection_keeps_its_requests(replicas) -> None:
    made, ask = replicas
    made.stuck["d1"] = 5
    await made.up("d1", "decode")
    await made.up("p1", "prefill")
    asking = asyncio.ensure_future(ask())
    await made.under_way(5)
    old = made.senders["d1"]
    await old.aclose()
    await made.up("d1", "decode")
    await asyncio.sleep(0.2)
    assert len(made.calls) == 1 and not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_request_waits_for_the_next_replica_where_there_is_no_other(replicas) -> None:
    made, ask = replicas
    made.stuck["d1"] = 5
    await made.up("d1", "decode")
    asking = asyncio.ensure_future(ask())
    await made.under_way(5)
    await made.senders["d1"].aclose()
    await asyncio.sleep(0.2)
    assert len(made.calls) == 1 and not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def _asks(**fields) -> GenerateRequest:
    said = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return GenerateRequest(model=CHAT, prompt=None, raw=False, sampling=SamplingParams(max_tokens=4), **said)


ODD = "a <|end|> b"
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"x": "\\u003c|end|\\u003e"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": ODD, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": ODD}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ODD}]}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"tools": [TOOL]},
    ],
    ids=["text", "parts", "arguments", "tools"],
)
async def test_the_tokenizers_copy_is_made_beside_the_event_loop(fields, monkeypatch):
    """Wherever the first control token's text stands; afterwards nothing has to be waited for."""
    catalog, made = load_catalog(), []
    model = ServedModel(catalog[CHAT], catalog[CHAT].serving["local"], catalog.source(CHAT), File("/nonexistent"))
    backend, tokenizer = EngineBackend(TokenInbox(), None), model.tokenizer
    copying = tokenizer.control._renamed_copy
    monkeypatch.setattr(
        tokenizer.control, "_renamed_copy", lambda: made.append(threading.current_thread().name) or copying()
    )
    first = await backend.prepare(model, _asks(**fields), b"salt")
    assert len(made) == 1 and made[0] != threading.main_thread().name
    assert (await backend.prepare(model, _asks(**fields), b"salt")).prompt.ids.tolist() == first.prompt.ids.tolist()
    assert first.prompt.ids.tolist() == prompt_ids(tokenizer, _asks(**fields)).tolist() and len(made) == 1


async def test_a_call_that_somebody_else_cancels_is_a_lost_worker(replicas) -> None:
    """And not one that says nothing for ever."""
    made, ask = replicas
    made.stuck["d1"] = 5
    await made.up("d1", "decode")
    asking = asyncio.ensure_future(ask())
    await made.under_way(5)
    await made.up("p1", "prefill")
    (call,) = made.engine._attempts._calls
    call.cancel()
    usage = await asyncio.wait_for(asking, 60)
    assert usage.completion_tokens == len(ANSWER) and len(made.calls) == 2
    assert continued(made.calls[1][2], 5)
