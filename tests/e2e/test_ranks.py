"""Workers of several ranks behind Ray and Serve: any process of one dies under load, and no answer shows it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tokenizers import Tokenizer

from serve_app.catalog.load import BUILT_IN, PROJECT_ROOT
from serve_app.config import load_settings
from tests import tiny
from tests.e2e.beside import served_beside
from tests.e2e.conftest import eos_id
from tests.variants import some
from tests.waiting import wait_for

PICO = PROJECT_ROOT / "checkpoints" / "pico-instruct"
TOKENS = 160
QUESTIONS = range(6)
# How the two ranks of a decode worker share the model.
WAYS = {
    "tensor": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "experts": {"tensor_parallel": 2, "expert_parallel": 2},
}


def record(way: str, weights: Path) -> dict[str, Any]:
    """A chat model: two decode workers of two ranks each, and a prefill worker of one process."""
    found = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    size = {"num_cpus": 0.25, "max_replicas": 1, "max_batch_tokens": 512, "max_num_seqs": 8, "cpu_threads": 1}
    size["kv_cache_bytes"] = "64MiB"
    decode = {**size, "min_replicas": 2, "max_replicas": 2, **WAYS[way]}
    for name in ("draft", "lora"):
        del found[name]
    found["properties"]["context_window"] = 1024
    stages = {"decode": decode, "prefill": size, "min_remote_prefill_tokens": 0}
    return {**found, "id": f"@cf/pico/{way}", "weights": {"path": str(weights)}, "serving": {"local": stages}}


def write_mixture(folder: Path) -> Path:
    """A random mixture that reads and writes the chat model's tokens."""
    tiny.write_checkpoint(folder, "mixtral", vocab_size=6144)
    for file in PICO.glob("*token*.json"):
        shutil.copy(file, folder / file.name)
    return folder


@dataclass(slots=True)
class Served:
    """A model behind a gateway, and what transformers answers with it."""

    http: httpx.Client
    model: str
    right: list[str]


@pytest.fixture(scope="module")
def served(request, stack, tmp_path_factory):
    way = request.param
    home = tmp_path_factory.mktemp(way)
    weights = write_mixture(home / "mixture") if way == "experts" else PICO
    told = record(way, weights)
    (home / "models").mkdir()
    (home / "models" / "ranks.yaml").write_text(yaml.safe_dump(told))
    settings = load_settings({"SERVE_APP_HOME": str(home), "SERVE_APP_MODELS": told["id"]})
    with served_beside(stack.url, settings, told["id"], way) as client:
        right = [answer_of(tiny.load_reference(weights), weights, question) for question in QUESTIONS]
        found = Served(client, told["id"], right)
        wait_for(lambda: len(groups(found)) == 2, 180, 0.5)
        yield found


def answer_of(model: Any, weights: Path, question: int) -> str:
    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    prompt = tokenizer.encode(asked(question)).ids
    tokens = tiny.reference_tokens(model, prompt, TOKENS, eos_token_id=None, suppress_tokens=[int(eos_id())])
    return tokenizer.decode(tokens)


def asked(question: int) -> str:
    return f"Question {question}: what is a list for? " * 6


def groups(served: Served) -> list[list[int]]:
    """Process ids of each decode worker, by rank; empty while some worker has nothing to tell."""
    with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
        told = served.http.get("/v1/status").json()["models"][served.model]
        if not told["silent"] and len(told["routing"]["workers"]) == 3:
            found = [worker["ranks"] for worker in told["workers"] if worker["stage"] == "decode"]
            return sorted([rank["pid"] for rank in ranks] for ranks in found)
    return []


def stream(served: Served, question: int, begun: threading.Semaphore | None = None) -> str:
    """Without its end-of-text token the model goes on until it is told to stop."""
    text, seen = "", 0
    body = {
        "model": served.model, "prompt": asked(question), "temperature": 0, "max_tokens": TOKENS,
        "logit_bias": {eos_id(): -100}, "stream": True,
    }  # fmt: skip
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
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


@pytest.mark.parametrize("served", some(WAYS, "stages", "experts"), indirect=True)
@pytest.mark.parametrize(
    ("rank", "how"),
    some([(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)], (1, signal.SIGKILL), names=2),
    ids=["0", "1", "1 is stopped"],
)
def test_a_rank_is_lost_under_load(served, rank, how):
    """Its group ends whole and another takes its place; what it had in hand goes on elsewhere, token for token."""
    wait_for(lambda: len(groups(served)) == 2, 120, 0.5)
    assert [stream(served, question) for question in QUESTIONS] == served.right
    before, begun = groups(served), threading.Semaphore(0)
    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        answers = [clients.submit(stream, served, question, begun) for question in QUESTIONS]
        for _ in QUESTIONS:
            assert begun.acquire(timeout=60)
        os.kill(before[0][rank], how)
        assert [answer.result() for answer in answers] == served.right
    wait_for(lambda: all(dead(pid) for pid in before[0]), 60)

    def replaced() -> bool:
        now = groups(served)
        return len(now) == 2 and before[1] in now and not {pid for pids in now for pid in pids} & set(before[0])

    wait_for(replaced, 120, 0.5)
    assert [stream(served, question) for question in QUESTIONS] == served.right
