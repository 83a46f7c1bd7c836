"""The engine's thread: what others may ask of it at any time, and that nobody is left waiting when something breaks."""

from __future__ import annotations

import threading

import pytest

from serve_app.engine.loop import EngineLoop, EngineStopped
from serve_app.engine.request import FINISH_ERROR, FINISH_REFUSED
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import Answer, HistoryModel, answer_alone, make_engine, random_prompt, request, take

WAIT = 60.0


class Poisonable(HistoryModel):
    """Fails on a batch that contains the token 31, as often as told; can be made to wait before a step."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def forward(self, batch):
        self.entered.set()
        assert self.gate.wait(WAIT)
        if 31 in batch.input_ids.tolist():
            raise ArithmeticError("poison")
        return super().forward(batch)

    def logits(self, history):
        logits = super().logits(history)
        logits[31] = -100.0
        return logits


class Client:
    """A loop and everything it said, with a way to wait for the end of requests."""

    def __init__(self, **options) -> None:
        self.model = Poisonable()
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, str | None] = {}
        self.threads: set[str] = set()
        self.changed = threading.Condition()
        self.engine = make_engine(self.model, **options)
        self.loop = EngineLoop(self.engine, self.heard, name="under test")

    def heard(self, outputs) -> None:
        assert outputs
        with self.changed:
            self.threads.add(threading.current_thread().name)
            failed = (FINISH_ERROR, FINISH_REFUSED)
            take([o for o in outputs if o.finish_reason not in failed], self.answers)
            for output in outputs:
                if output.finish_reason in failed:
                    assert output.request_id not in self.errors
                    self.errors[output.request_id] = output.error
                    self.answers.setdefault(
                        output.request_id, Answer([], "", None)
                    ).finish_reason = output.finish_reason
            self.changed.notify_all()

    def wait_for(self, *names: str) -> list[str]:
        with self.changed:
            assert self.changed.wait_for(
                lambda: all(n in self.answers and self.answers[n].finish_reason for n in names), WAIT
            )
            return [self.answers[n].finish_reason for n in names]

    def hold(self) -> None:
        """Keeps the engine's thread inside a step until the gate opens."""
        self.model.gate.clear()
        self.model.entered.clear()

    def alone(self, prompt, **sampling) -> list[int]:
        return answer_alone(
            self.model, prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
        ).tokens


@pytest.fixture
def client():
    client = Client()
    yield client
    client.model.gate.set()
    client.loop.stop()


def poison(name: str):
    return request(name, [1, 31])


def test_many_threads_add_at_once(client):
    prompts = {f"{t}/{i}": random_prompt(17 * t + i, 3 + 4 * i, 31) for t in range(4) for i in range(6)}

    def add(thread):
        for name, prompt in prompts.items():
            if name.startswith(f"{thread}/"):
                client.loop.add(request(name, prompt))

    threads = [threading.Thread(target=add, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    client.wait_for(*prompts)
    for thread in threads:
        thread.join()
    assert {n: a.tokens for n, a in client.answers.items()} == {n: client.alone(p) for n, p in prompts.items()}
    assert client.threads == {"under test"}


def test_it_sleeps_while_there_is_nothing_to_do(client):
    client.loop.add(request("x", [1]))
    client.wait_for("x")
    client.loop.call(lambda engine: None).result(WAIT)
    steps = client.loop.steps
    assert steps == 8
    for _ in range(20):
        client.loop.call(lambda engine: None).result(WAIT)
    assert client.loop.steps == steps


def test_abort_from_another_thread(client):
    client.hold()
    client.loop.add(request("gone", [1, 2], max_tokens=2000))
    client.loop.add(request("stays", [3, 4]))
    assert client.model.entered.wait(WAIT)
    client.loop.abort("gone")
    client.loop.abort("never seen")
    client.model.gate.set()
    assert client.wait_for("stays") == ["length"]
    assert client.answers["stays"].tokens == client.alone([3, 4])
    # One step was under way, and after the abort nothing is said any more.
    assert len(client.answers["gone"].tokens) <= 1 and client.answers["gone"].finish_reason == ""
    assert client.loop.call(lambda engine: engine.scheduler.blocks.used_blocks).result(WAIT) == 0


def test_call_runs_in_the_engines_thread_between_steps(client):
    client.hold()
    client.loop.add(request("x", [1, 2]))
    assert client.model.entered.wait(WAIT)
    future = client.loop.call(lambda engine: (threading.current_thread().name, engine.stats.steps))
    assert not future.done()
    client.model.gate.set()
    assert future.result(WAIT) == ("under test", 1)

    def fails(engine):
        raise LookupError("yours")

    with pytest.raises(LookupError, match="yours"):
        client.loop.call(fails).result(WAIT)
    assert client.wait_for("x") == ["length"]


def test_a_refused_request_gets_its_reason_and_harms_nobody(client):
    client.loop.add(request("fine", [1, 2]))
    client.loop.add(request("long", [1] * 5000))
    client.loop.add(request("empty", []))
    assert client.wait_for("fine", "long", "empty") == ["length", FINISH_REFUSED, FINISH_REFUSED]
    assert "5000" in client.errors["long"] and "one token" in client.errors["empty"]
    assert client.answers["fine"].tokens == client.alone([1, 2])


def test_a_poisoned_step_fails_everyone_in_it_and_the_loop_lives_on(client):
    client.loop.add(request("before", random_prompt(0, 70, 31)))
    client.wait_for("before")
    client.hold()
    client.loop.add(request("running", random_prompt(0, 70, 31), max_tokens=900))
    assert client.model.entered.wait(WAIT)
    client.loop.add(poison("bad"))
    client.model.gate.set()
    assert client.wait_for("running", "bad") == [FINISH_ERROR, FINISH_ERROR]
    assert "ArithmeticError" in client.errors["running"] and "ArithmeticError" in client.errors["bad"]

    blocks = client.loop.call(
        lambda engine: (engine.scheduler.blocks.used_blocks, engine.scheduler.blocks.cached_blocks)
    )
    assert blocks.result(WAIT) == (0, 0)
    after = request("after", random_prompt(0, 70, 31))
    client.loop.add(after)
    assert client.wait_for("after") == ["length"]
    assert client.answers["after"].tokens == client.alone(random_prompt(0, 70, 31))
    assert after.cached == 0
    assert client.loop.failed is None


def test_failures_count_only_in_a_row(client):
    for turn in range(4):
        for name in ("a", "b"):
            client.loop.add(poison(f"{name}{turn}"))
            client.wait_for(f"{name}{turn}")
        client.loop.add(request(f"fine{turn}", [1]))
        assert client.wait_for(f"fine{turn}") == ["length"]
    assert client.loop.failed is None


def test_three_failures_in_a_row_end_the_loop(client):
    for name in "abc":
        client.loop.add(poison(name))
        client.wait_for(name)
    assert isinstance(client.loop.failed, ArithmeticError)
    for submit in (
        lambda: client.loop.add(request("x", [1])),
        lambda: client.loop.abort("x"),
        lambda: client.loop.call(print),
    ):
        with pytest.raises(EngineStopped) as caught:
            submit()
        assert caught.value.__cause__ is client.loop.failed


def test_stop_fails_the_rest():
    client = Client(max_num_seqs=1)
    client.hold()
    client.loop.add(request("running", [1, 2], max_tokens=2000))
    assert client.model.entered.wait(WAIT)
    client.loop.add(request("waiting", [1, 2]))
    stopper = threading.Thread(target=client.loop.stop)
    stopper.start()
    client.model.gate.set()
    stopper.join(WAIT)
    assert client.wait_for("running", "waiting") == [FINISH_ERROR, FINISH_ERROR]
    assert "stopped" in client.errors["running"]
    with pytest.raises(EngineStopped):
        client.loop.add(request("late", [1]))
    client.loop.stop()
    assert client.loop.failed is None


def test_what_was_queued_behind_a_stop_is_answered():
    client = Client()
    client.hold()
    client.loop.add(request("running", [1, 2], max_tokens=2000))
    assert client.model.entered.wait(WAIT)
    client.loop.stop(timeout=0.0)
    client.loop.add(request("behind", [1, 2]))
    future = client.loop.call(lambda engine: 7)
    client.model.gate.set()
    assert client.wait_for("running", "behind") == [FINISH_ERROR, FINISH_ERROR]
    assert future.result(WAIT) == 7


def test_a_listener_that_breaks_is_a_failure_one_can_see():
    raised = threading.Event()

    def broken(outputs):
        raised.set()
        raise OSError("nobody listens")

    loop = EngineLoop(make_engine(HistoryModel()), broken)
    loop.add(request("x", [1]))
    assert raised.wait(WAIT)
    loop.stop()
    assert isinstance(loop.failed, OSError)
    with pytest.raises(EngineStopped):
        loop.add(request("y", [1]))
