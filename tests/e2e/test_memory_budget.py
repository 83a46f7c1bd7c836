"""One machine with a memory budget: models take turns within it, in real workers whose memory the kernel tells."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from benchmarks import ROOT
from benchmarks.checks import Checks
from benchmarks.serving.from_zero import MODEL, Client, make_home
from benchmarks.serving.known import known
from benchmarks.serving.processes import descendants, name_of
from benchmarks.serving.stack import Server
from benchmarks.serving.turns import Sampler, memory_of, take_turns
from tests.conftest import _free_port
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow
# Of these two fit beside each other.
BUDGET = "420MiB"
TASKS = ("text-classification", "image-classification", "object-detection", "summarization")
LARGE = "@cf/pico/large"


@pytest.fixture(scope="module")
def asked():
    return [each for each in known() if each.task in TASKS]


@pytest.fixture(scope="module")
def machine(asked, tmp_path_factory):
    """A server of its own; beside the four are one that chats, and one that can never fit."""
    home = tmp_path_factory.mktemp("budget")
    names = [each.model for each in asked]
    make_home(home, [*names, MODEL], 3600)
    [file] = [each for each in (home / "models").iterdir() if MODEL in each.read_text()]
    chats = yaml.safe_load(file.read_text())
    for stage in ("decode", "prefill"):
        chats["serving"]["local"][stage]["kv_cache_bytes"] = "16MiB"
    file.write_text(yaml.safe_dump(chats))
    record = yaml.safe_load((ROOT / "serve_app" / "catalog" / "models" / "pico-vision.yaml").read_text())
    record |= {"id": LARGE, "weights": {"path": str(ROOT / "checkpoints" / "pico-vision")}}
    record["serving"]["local"]["decode"]["kv_cache_bytes"] = "8GiB"
    (home / "models" / "large.yaml").write_text(yaml.safe_dump(record))
    ports = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    server = Server(
        _free_port(), SERVE_APP_HOME=str(home), SERVE_APP_MODELS=",".join([*names, LARGE, MODEL]),
        SERVE_APP_MEMORY_BUDGET=BUDGET, SERVE_APP_OBJECT_STORE_BYTES="256MiB",
        **{name: str(_free_port()) for name in ports},
    )  # fmt: skip
    server.start()
    yield server
    server.stop()


def get(server, path: str):
    request = urllib.request.Request(f"{server.url}{path}", headers={"Authorization": f"Bearer {server.key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


def test_four_take_turns_where_two_fit(machine, asked, capsys) -> None:
    checks = Checks()
    found = take_turns(machine, asked, 2, checks, lambda line: None)
    checks.require()
    assert 0 < found.peak <= found.budget == 420 << 20
    assert found.workers <= 2 and found.samples > 10
    # Each has been put to sleep and has come back.
    assert found.moves["wakes"] >= 8 and found.moves["sleeps"] >= 6


def test_a_model_that_can_never_fit_is_refused_by_name(machine) -> None:
    health = json.loads(get(machine, "/health"))
    assert health["memory"]["budget_bytes"] == 420 << 20
    told = health["models"][LARGE]["memory"]
    assert told["state"] == "never" and LARGE in told["why"] and "SERVE_APP_MEMORY_BUDGET" in told["why"]
    body = json.dumps({"prompt": "What do you see?"}).encode()
    headers = {"Authorization": f"Bearer {machine.key}", "Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(
            urllib.request.Request(f"{machine.url}/client/v4/accounts/local/ai/run/{LARGE}", body, headers), timeout=120
        )
    [error] = json.load(refused.value)["errors"]
    assert (refused.value.code, error["code"]) == (429, 3040)
    assert LARGE in error["message"] and "memory budget of 420 MiB" in error["message"]


def test_what_is_held_is_shown(machine, asked) -> None:
    assert asked[0].ask(machine.url, machine.key) is None
    model = asked[0].model

    def shown() -> tuple[dict, dict] | None:
        """The gateway's copy of what the broker knows: it may be a second or more older than the answer."""
        node = memory_of(machine)
        [worker] = [each for each in node["workers"] if each["model"] == model]
        return (node, worker) if worker["state"] == "up" else None

    node, worker = wait_for(shown, 30)
    assert worker["needs_bytes"] <= node["reserved_bytes"] <= node["budget_bytes"]
    lines = get(machine, "/metrics").decode().splitlines()
    told = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
    assert told["serve_app_memory_budget_bytes"] == 420 << 20
    assert told[f'serve_app_memory_held_bytes{{model="{model}",stage="predictor"}}'] <= 420 << 20


def test_a_stream_waits_for_who_always_works_and_is_told_so(machine, asked) -> None:
    """The chat model needs nearly all of the budget: its prefill worker stays away, which answers do not need."""
    over, wrong, answers = threading.Event(), [], []

    def always() -> None:
        while not over.is_set():
            problem = asked[0].ask(machine.url, machine.key)
            answers.append(problem)
            wrong.extend([problem] if problem else [])

    threads = [threading.Thread(target=always) for _ in range(3)]
    assert asked[0].ask(machine.url, machine.key) is None
    before = memory_of(machine)
    for thread in threads:
        thread.start()
    try:
        with Sampler(machine.pid) as sampler:
            lines: list[bytes] = []
            client = Client(machine.url, machine.key, MODEL)
            client.stream(lines.append)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert any(b"waits for room" in line and b"memory budget of 420 MiB" in line for line in lines)
    assert wrong == [] and answers and sampler.peak <= 420 << 20
    after = memory_of(machine)
    assert after["closes"] > before["closes"] and after["losses"] == before["losses"]


async def test_a_broker_that_is_killed_is_started_again_and_nobody_is_lost(machine, asked) -> None:
    for each in asked[:2]:
        assert each.ask(machine.url, machine.key) is None
    brokers = [pid for pid in descendants(machine.pid) if name_of(pid).startswith("ray::MemoryBroker")]
    [broker] = brokers
    os.kill(broker, signal.SIGKILL)
    with Sampler(machine.pid) as sampler:
        for each in asked:
            assert each.ask(machine.url, machine.key) is None
    assert 0 < sampler.peak <= 420 << 20 and memory_of(machine)["losses"] == 0


async def test_a_worker_that_is_killed_comes_back_in_its_own_room(machine, asked) -> None:
    """And is counted, so that the other tests would see it."""
    assert asked[0].ask(machine.url, machine.key) is None
    workers = [pid for pid in descendants(machine.pid) if name_of(pid).startswith("ray::PredictorWorker")]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: memory_of(machine)["losses"] == len(workers), 30)
    with Sampler(machine.pid) as sampler:
        for each in asked:
            assert each.ask(machine.url, machine.key) is None
    assert 0 < sampler.peak <= 420 << 20


def test_what_was_measured_is_remembered(machine) -> None:
    file = Path(machine._environment["SERVE_APP_HOME"]) / "memory.json"
    sizes = {" ".join(key.split()[:2]): size >> 20 for key, size in json.loads(file.read_text()).items()}
    assert not {name: size for name, size in sizes.items() if not 64 < size <= 420} and len(sizes) >= len(TASKS)
