"""Workers of several ranks behind Ray and Serve: any process of one dies under load, and no answer shows it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml

from serve_app.catalog.load import BUILT_IN, PROJECT_ROOT
from serve_app.config import load_settings
from tests.e2e.beside import served_beside
from tests.e2e.conftest import CHAT, eos_id
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
MODEL = "@cf/pico/ranks"
TOKENS = 160


def record() -> dict[str, Any]:
    """The chat model: two decode workers of two ranks each, and a prefill worker of one process."""
    found = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    size = {"num_cpus": 0.25, "max_replicas": 1, "max_batch_tokens": 512, "max_num_seqs": 8, "cpu_threads": 1}
    decode = {**size, "min_replicas": 2, "max_replicas": 2, "tensor_parallel": 2, "kv_cache_bytes": "64MiB"}
    for name in ("draft", "lora"):
        del found[name]
    stages = {"decode": decode, "prefill": {**size, "kv_cache_bytes": "64MiB"}, "min_remote_prefill_tokens": 0}
    weights = {"path": str(PROJECT_ROOT / "checkpoints" / "pico-instruct")}
    return {**found, "id": MODEL, "weights": weights, "serving": {"local": stages}}


@pytest.fixture(scope="module")
def http(stack, tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    (home / "models").mkdir()
    (home / "models" / "ranks.yaml").write_text(yaml.safe_dump(record()))
    settings = load_settings({"SERVE_APP_HOME": str(home), "SERVE_APP_MODELS": MODEL})
    with served_beside(stack.url, settings, MODEL, "ranks") as client:
        wait_for(lambda: len(groups(client)) == 2, 180, 0.5)
        yield client


def groups(http: httpx.Client) -> list[list[int]]:
    """Process ids of each decode worker, by rank; empty while some worker has nothing to tell."""
    with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
        told = http.get("/v1/status").json()["models"][MODEL]
        if not told["silent"] and len(told["routing"]["workers"]) == 3:
            found = [worker["ranks"] for worker in told["workers"] if worker["stage"] == "decode"]
            return sorted([rank["pid"] for rank in ranks] for ranks in found)
    return []


def body(question: int) -> dict[str, Any]:
    """Without its end-of-text token the model goes on until it is told to stop."""
    return {
        "model": MODEL, "prompt": f"Question {question}: what is a list for? " * 6, "temperature": 0,
        "max_tokens": TOKENS, "logit_bias": {eos_id(): -100},
    }  # fmt: skip


def stream(http: httpx.Client, question: int, begun: threading.Semaphore | None = None) -> str:
    text, seen = "", 0
    with http.stream("POST", "/v1/completions", json={**body(question), "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line.removeprefix("data: "))
                assert "error" not in frame, frame
                text += "".join(choice["text"] for choice in frame["choices"])
                seen += 1
                if seen == 5 and begun is not None:
                    begun.release()
    return text


def dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("rank", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)], ids=["0", "1", "1 is stopped"]
)
def test_a_rank_is_lost_under_load(stack, http, rank, how):
    """Its group ends whole and another takes its place; what it had in hand goes on elsewhere, token for token."""
    questions = range(6)
    with httpx.Client(base_url=stack.url, headers=stack.headers, timeout=120) as plain:
        asked = [{**body(question), "model": CHAT} for question in questions]
        right = [plain.post("/v1/completions", json=each).json()["choices"][0]["text"] for each in asked]
    wait_for(lambda: len(groups(http)) == 2, 120, 0.5)
    assert [stream(http, question) for question in questions] == right
    before, begun = groups(http), threading.Semaphore(0)
    with ThreadPoolExecutor(len(questions)) as clients:
        answers = [clients.submit(stream, http, question, begun) for question in questions]
        for _ in questions:
            assert begun.acquire(timeout=60)
        os.kill(before[0][rank], how)
        assert [answer.result() for answer in answers] == right
    wait_for(lambda: all(dead(pid) for pid in before[0]), 60)

    def replaced() -> bool:
        now = groups(http)
        return len(now) == 2 and before[1] in now and not {pid for pids in now for pid in pids} & set(before[0])

    wait_for(replaced, 120, 0.5)
    assert [stream(http, question) for question in questions] == right
