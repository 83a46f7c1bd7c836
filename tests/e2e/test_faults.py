"""Any actor may die at any moment: the client sees a finished answer or an honest error, never a wrong token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray

from benchmarks.chaos.target import GATEWAY, named
from benchmarks.serving.processes import descendants
from tests.e2e.conftest import CHAT, eos_id

PROMPT = "Write something long about Python. " * 8
# Without its end-of-text token the model goes on until max_tokens.
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 200, "raw": True, "logit_bias": {eos_id(): -100}}


def status(stack) -> dict:
    answer = httpx.get(f"{stack.url}/v1/status", headers=stack.headers, timeout=120)
    return answer.json()["models"][CHAT]


def all_of(told: dict) -> list[dict] | None:
    """Counters of all workers; None while some have none to tell."""
    return None if told["silent"] else told["workers"]


def workers(stack) -> dict[str, dict]:
    """Counters by stage, summed over a stage's replicas (the autoscaler may have added one), and their ``pids``."""
    stages: dict[str, dict] = {}
    for worker in wait_for(lambda: all_of(status(stack))):
        flat = {**worker, **{f"pool_{k}": v for k, v in (worker.get("pool") or {}).items()}}
        total = stages.setdefault(worker["stage"], {"pids": set()})
        total["pids"].add(worker["pid"])
        for name, value in flat.items():
            if isinstance(value, (int, float)) and name != "pid":
                total[name] = total.get(name, 0) + value
    return stages


def kill(stack, stage: str, how: signal.Signals = signal.SIGKILL) -> set[int]:
    """Kills all workers of a stage; returns their process ids."""
    pids = workers(stack)[stage]["pids"]
    for pid in pids:
        os.kill(pid, how)
    return pids


def kill_replica(stack, deployment: str) -> None:
    """Kills the process of a replica of the chat model; its worker ends after it."""
    title = f"ray::ServeReplica:cf--pico--pico-instruct:{deployment}".encode()
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                found.append(pid)
    assert found, f"no process is called {title!r}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def wait_for(condition, seconds: float = 60, every: float = 0.2):
    until = time.monotonic() + seconds
    while True:
        try:
            if (value := condition()) is not None and value is not False:
                return value
        except (httpx.HTTPError, KeyError, ValueError):
            pass
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(every)


def replaced(stack, stage: str, killed: set[int]):
    """Waits until another worker of a stage is there and the model is ready."""

    def check():
        found = workers(stack).get(stage)
        return found is not None and not found["pids"] & killed and stack.health()[0] == 200

    wait_for(check, 90)


@pytest.fixture
def undisturbed(run):
    return run(CHAT, BODY)["response"]


def test_prefill_worker_killed_between_two_requests(stack, run):
    body = {"prompt": "What does os.path.split do, in one sentence, please?", "temperature": 0, "max_tokens": 40}
    first = run(CHAT, body)
    killed = kill(stack, "prefill")
    second = run(CHAT, body)
    assert second["response"] == first["response"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    # A prompt nobody has seen, with no prefill worker: decode computes it itself.
    fresh = run(CHAT, {**body, "prompt": "A prompt that nobody has seen before, to be computed somewhere else."})
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    replaced(stack, "prefill", killed)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_decode_worker_lost_in_the_middle_of_streams(stack, run, undisturbed, how):
    """With adapters and without, each goes on with another worker, token for token what it would have been; a worker
    that is stopped is killed after a few seconds.
    """
    wanted = {lora: run(CHAT, {**BODY, "lora": lora})["response"] for lora in ("pirate", "json")}
    wanted[""] = undisturbed
    assert len(set(wanted.values())) == 3
    killed: set[int] = set()
    begun = {lora: threading.Event() for lora in wanted}

    def stream(lora: str) -> tuple[str, str]:
        text, finish, seen = "", "", 0
        asked = {**BODY, "stream": True} | ({"lora": lora} if lora else {})
        with httpx.stream("POST", f"{stack.api}/run/{CHAT}", json=asked, headers=stack.headers, timeout=120) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                frame = json.loads(line.removeprefix("data: "))
                assert "errors" not in frame, frame
                text += frame["response"]
                finish = frame.get("finish_reason", finish)
                begun[lora].set()
                seen += 1
                if seen == 5 and not lora:
                    killed.update(kill(stack, "decode", how))
        assert frame["usage"]["completion_tokens"] == BODY["max_tokens"]
        return text, finish

    with ThreadPoolExecutor(3) as clients:
        adapted = {lora: clients.submit(stream, lora) for lora in ("pirate", "json")}
        for lora in adapted:
            assert begun[lora].wait(60)
        found = {"": stream("")} | {lora: ending.result() for lora, ending in adapted.items()}
    assert found == {lora: (text, "length") for lora, text in wanted.items()}
    replaced(stack, "decode", killed)


@pytest.mark.slow
def test_a_prefill_worker_that_is_stopped_is_not_waited_for_long(stack, run):
    body = {"prompt": "A prompt whose prefill worker does not answer. " * 3, "temperature": 0, "max_tokens": 20}
    stopped = kill(stack, "prefill", signal.SIGSTOP)
    began = time.monotonic()
    run(CHAT, body)
    assert time.monotonic() - began < 40  # Serve's own health checks take more than a minute
    replaced(stack, "prefill", stopped)


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["Prefill", "Draft", "Decode"])
def test_a_model_that_has_lost_a_stage_answers_with_the_others(stack, run, undisturbed, deployment):
    """At once and all the time until the replica is back: a request that waits for it would take as long as it does."""
    before = workers(stack)[deployment.lower()]["pids"]
    kill_replica(stack, deployment)
    back = False
    while not back:
        answer = httpx.post(f"{stack.api}/run/{CHAT}", headers=stack.headers, json=BODY, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["result"]["response"] == undisturbed
        found = {w["pid"] for w in status(stack)["workers"] if w["stage"] == deployment.lower()}
        back = bool(found) and found.isdisjoint(before)
    replaced(stack, deployment.lower(), before)
    assert run(CHAT, BODY)["response"] == undisturbed


def test_a_fresh_decode_worker_reuses_what_the_lost_one_had_computed(stack, run):
    body = {
        "prompt": "Explain the difference between a list and a tuple in Python.",
        "temperature": 0,
        "max_tokens": 20,
    }
    first = run(CHAT, body)
    killed = kill(stack, "decode")
    replaced(stack, "decode", killed)
    again = run(CHAT, body)
    assert again["response"] == first["response"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_draft_worker_killed_while_it_drafts(stack, run, undisturbed):
    killed = workers(stack)["draft"]["pids"]
    for pid in killed:
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    assert run(CHAT, BODY)["response"] == undisturbed
    assert run(CHAT, BODY)["response"] == undisturbed
    replaced(stack, "draft", killed)
    # Whether it is asked is for the controller to say, which knows what drafts cost on this machine.
    wait_for(lambda: workers(stack)["decode"]["draft_connected"] >= 1, 90)
    assert run(CHAT, BODY)["response"] == undisturbed


def test_pool_killed(stack, run, undisturbed):
    from serve_app.kv.nodes import pool_name
    from serve_app.kv.pool import NAMESPACE

    node = ray.get_runtime_context().get_node_id()
    body = {"prompt": "What does the pool hold when it has been killed?", "temperature": 0, "max_tokens": 10}
    first = run(CHAT, body)
    ray.kill(ray.get_actor(pool_name(node), namespace=NAMESPACE), no_restart=False)
    assert run(CHAT, BODY)["response"] == undisturbed
    assert run(CHAT, body)["response"] == first["response"]

    def cached_again():
        return run(CHAT, body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    wait_for(cached_again, 90)


def test_gateway_killed_in_the_middle_of_a_stream(stack, run, undisturbed):
    """Its connections break; whoever asks meanwhile is told to come back, and the engine's places are free again."""
    long = {"prompt": "on and on", "raw": True, "max_tokens": 3000, "stream": True, "logit_bias": {eos_id(): -100}}
    with (
        httpx.Client(headers=stack.headers, timeout=60) as client,
        client.stream("POST", f"{stack.api}/run/{CHAT}", json=long) as answer,
        contextlib.suppress(httpx.HTTPError),
    ):
        lines = answer.iter_lines()
        next(lines)
        [gateway] = named(os.getpid(), GATEWAY)
        os.kill(gateway, signal.SIGKILL)
        assert "data: [DONE]" not in list(lines)
    said = set()

    def answers() -> bool:
        try:
            answer = httpx.post(f"{stack.api}/run/{CHAT}", headers=stack.headers, json=BODY, timeout=60)
        except httpx.TransportError:
            return False
        said.add(answer.status_code)
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1 and answer.json()["errors"][0]["code"] == 3040
        return answer.status_code == 200 and answer.json()["result"]["response"] == undisturbed

    wait_for(answers, 90)
    assert said <= {200, 503}
    wait_for(lambda: workers(stack)["decode"]["running"] == 0, 90)


def test_counters_do_not_wait_for_a_worker_that_is_held_up(stack):
    pids = workers(stack)["decode"]["pids"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        # The others may be slow to answer on a busy machine, once or twice.
        for _ in range(3):
            if (told := status(stack))["silent"] == ["decode"]:
                break
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert told["ready"] and told["silent"] == ["decode"]
    assert {"prefill", "draft"} <= {worker["stage"] for worker in told["workers"]}
    assert workers(stack)["decode"]["pids"] == pids
