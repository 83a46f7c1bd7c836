"""Requests that go to one worker together, over a real channel; the calls are the test's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from serve_app.api.errors import OutOfCapacity
from serve_app.channel.inbox import TokenInbox
from serve_app.channel.sender import TokenSender
from serve_app.gateway.backends.bundles import Bundles
from serve_app.gateway.dispatch.ticket import Destination
from serve_app.sampling_params import SamplingParams
from serve_app.tasks.work import WorkerGone
from serve_app.wire.generate import (
    HERE,
    Failed,
    GenerateCall,
    Generated,
    GeneratedMany,
    GenerateMany,
    PrefillAt,
    PromptPath,
)
from serve_app.wire.tokens import Ending
from tests.waiting import until

TO = Destination("decode", "d1", HERE)


class Model:
    id = "a model"


def result(name: str) -> Generated:
    return Generated(name, 0, PromptPath(), (), "d1")


@dataclass
class World:
    inbox: TokenInbox
    sender: TokenSender
    bundles: Bundles = None  # type: ignore[assignment]
    calls: list[tuple[str, Any, str]] = field(default_factory=list)
    answers: list[asyncio.Future] = field(default_factory=list)

    async def call(self, model, method, call, stage="", replica=""):
        self.calls.append((method.name, call, replica))
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    def ask(self, *names: str, to: Destination = TO, priority: str = "batch") -> dict[str, asyncio.Task]:
        return {
            name: asyncio.ensure_future(self.bundles.generate(Model, self.made(name, priority), to))  # type: ignore[arg-type]
            for name in names
        }

    def made(self, name: str, priority: str = "batch") -> GenerateCall:
        return GenerateCall(name, b"", b"", SamplingParams(), self.inbox.address, priority)  # type: ignore[arg-type]

    def end(self, name: str) -> None:
        self.sender.ended(self.inbox.address, Ending(name, result(name).encode()))


@pytest.fixture
async def world():
    inbox = TokenInbox()
    await inbox.start()
    sender = TokenSender("d1")
    sender.subscribe(inbox.address, 60.0)
    made = World(inbox, sender)
    made.bundles = Bundles(inbox, made.call)
    await until(lambda: "d1" in inbox.workers)
    yield made
    await sender.aclose()
    await inbox.aclose()


async def test_each_ends_by_itself_though_all_go_in_one_call(world):
    asked = world.ask("a", "b", "c")
    await until(lambda: world.calls)
    ((method, call, replica),) = world.calls
    assert (method, replica) == ("generate_many", "d1") and isinstance(call, GenerateMany)
    assert [one.id for one in call.calls] == ["a", "b", "c"]
    world.end("b")
    assert await asked["b"] == result("b")
    assert not asked["a"].done() and not asked["c"].done()
    # What the channel has not brought is in the answer; what it has is not told again.
    world.answers[0].set_result(GeneratedMany((Failed("no", True), result("b"), result("c"))))
    assert await asked["a"] == Failed("no", True) and await asked["c"] == result("c")
    assert len(world.calls) == 1


async def test_one_alone_takes_the_call_of_one(world):
    asked = world.ask("a")
    await until(lambda: world.calls)
    assert world.calls[0][0] == "generate"
    world.answers[0].set_result(result("a"))
    assert await asked["a"] == result("a")


async def test_other_workers_and_more_than_fit_have_calls_of_their_own(world, monkeypatch):
    monkeypatch.setattr("serve_app.gateway.backends.bundles.MOST", 2)
    asked = world.ask("a", "b", "c", "d") | world.ask("e", "f", to=Destination("decode", "d2", HERE))
    await until(lambda: len(world.calls) == 3)
    assert [([one.id for one in call.calls], replica) for _, call, replica in world.calls] == [
        (["a", "b"], "d1"), (["c", "d"], "d1"), (["e", "f"], "d2")
    ]  # fmt: skip
    for answer, (_, call, _) in zip(world.answers, world.calls, strict=True):
        answer.set_result(GeneratedMany(tuple(result(one.id) for one in call.calls)))
    assert [await task for task in asked.values()] == [result(name) for name in asked]


async def test_in_real_time_the_first_goes_at_once_and_those_behind_it_together(world, monkeypatch):
    """Never with a batch's, which may wait for longer."""
    monkeypatch.setattr("serve_app.gateway.backends.bundles.WAIT_S", 3600.0)
    monkeypatch.setattr("serve_app.gateway.backends.bundles.APART_S", 0.2)
    world.ask("batch", "another")
    world.ask("a", priority="realtime")
    await until(lambda: world.calls)
    assert (world.calls[0][0], world.calls[0][1].id) == ("generate", "a")
    world.ask("b", priority="realtime")
    await asyncio.sleep(0)
    world.ask("c", priority="realtime")
    await until(lambda: len(world.calls) > 1)
    assert world.calls[1][0] == "generate_many" and [one.id for one in world.calls[1][1].calls] == ["b", "c"]
    assert len(world.calls) == 2


@pytest.mark.parametrize("over", ["its call", "its tokens"])
async def test_nobody_waits_for_what_is_over(world, monkeypatch, over):
    """One client that sends a request after the other has the end of each before its call has come back."""
    monkeypatch.setattr("serve_app.gateway.backends.bundles.APART_S", 3600.0)
    for name in "abc":
        asked = world.ask(name, priority="realtime")
        await until(lambda name=name: world.calls and world.calls[-1][1].id == name)
        if over == "its tokens":
            world.bundles.told(name)
            continue
        world.answers[-1].set_result(result(name))
        assert await asked[name] == result(name)
    assert not world.bundles._last and not world.bundles._under_way


async def test_an_end_that_a_broken_connection_has_lost_is_told_again(world):
    asked = world.ask("a", "b")
    await until(lambda: world.calls)
    kept, world.inbox.on_ended = world.inbox.on_ended, None
    world.end("a")
    await asyncio.sleep(0.05)
    world.inbox.on_ended = kept
    for connection in list(world.inbox._connections):
        connection.close()
    world.end("b")
    assert await asked["a"] == result("a") and await asked["b"] == result("b")
    assert not world.answers[0].done()


@pytest.mark.parametrize("error", [WorkerGone("lost"), OutOfCapacity(retry_after=3)])
async def test_what_is_left_of_a_lost_worker_is_lost(world, error):
    asked = world.ask("a", "b", "c")
    await until(lambda: world.calls)
    world.end("a")
    assert await asked["a"] == result("a")
    world.answers[0].set_exception(error)
    for name in ("b", "c"):
        with pytest.raises(type(error)):
            await asked[name]
    assert len(world.calls) == 1


async def test_a_call_that_fails_as_a_whole_is_made_for_each(world):
    """One of them may be at fault, or the replica is of another version and knows no bundles."""
    asked = world.ask("a", "b")
    await until(lambda: world.calls)
    world.answers[0].set_exception(AttributeError("generate_many"))
    await until(lambda: len(world.calls) == 3)
    assert [(method, call.id) for method, call, _ in world.calls[1:]] == [("generate", "a"), ("generate", "b")]
    world.answers[1].set_exception(ValueError("its own"))
    world.answers[2].set_result(result("b"))
    with pytest.raises(ValueError, match="its own"):
        await asked["a"]
    assert await asked["b"] == result("b")


async def test_the_call_is_cancelled_with_the_last_that_waits(world):
    asked = world.ask("a", "b", "c", "d")
    asked["d"].cancel()
    await until(lambda: world.calls)
    assert [one.id for one in world.calls[0][1].calls] == ["a", "b", "c"]
    asked["a"].cancel()
    world.end("b")
    await asked["b"]
    await until(asked["a"].done)
    assert not world.answers[0].done()
    asked["c"].cancel()
    await until(world.answers[0].cancelled)


async def test_a_call_that_somebody_else_cancels_is_a_lost_worker(world):
    asked = world.ask("a", "b")
    await until(lambda: world.calls)
    world.answers[0].cancel()
    for task in asked.values():
        with pytest.raises(WorkerGone):
            await task


@pytest.mark.parametrize(
    ("priority", "to", "takes"),
    [
        ("batch", TO, True),
        ("realtime", TO, True),
        ("batch", Destination("decode", "d1", PrefillAt("prefill", "p1")), False),
        # Nothing is known of a worker, and so of no channel either.
        ("batch", Destination(prefill=HERE), False),
        ("batch", Destination("decode", "d1"), False),
    ],
)
async def test_what_waits_for_others(world, priority, to, takes):
    assert world.bundles.takes(world.made("a", priority), to) is takes
    told = SamplingParams(prompt_logprobs=1)
    assert not world.bundles.takes(replace(world.made("a", priority), sampling=told), to)


async def test_what_cannot_be_read_waits_for_the_call(world):
    asked = world.ask("a", "b")
    await until(lambda: world.calls)
    world.sender.ended(world.inbox.address, Ending("a", b"\x91\xa1x"))
    world.sender.ended(world.inbox.address, Ending("nobody's", result("x").encode()))
    world.end("b")
    await asked["b"]
    assert not asked["a"].done()
    world.answers[0].set_result(GeneratedMany((result("a"), result("b"))))
    assert await asked["a"] == result("a")
