"""A batch through the whole server, over its own engine run on the same requests without one, in turn.

The server has one model with one worker that prefills and decodes. Offline, the engine gets all prompts at once as
token ids, with the worker's limits and threads. What the server adds is checking, ordering, its route, tokenising,
sampling parameters, frames of tokens, answers, results and the ledger on disk, and files of results: on the same cores.
A batch's time is that from its submission until its results are there.

``engine`` is what the worker's engine did meanwhile, by its own clock and the kernel's counters of its thread: so many
seconds in steps, of which it computed, waited for a core that another process had, and was held up by other threads of
its own process. Whatever else the machine does is in ``waited_s``, and the rest says what the server costs its engine.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks import CHECKPOINTS
from benchmarks.batch.files import short_requests
from benchmarks.checks import Checks
from benchmarks.engine.checkpoint import SIZES
from benchmarks.serving.stack import local_stack, write_checkpoint

LEAST_SHARE = 0.9
MODEL = "@cf/benchmark/batch"
TOKENS = 16  # of each answer
PICO = "pico-instruct"
MODELS = (PICO, *SIZES)
PLACES, STEP, CONTEXT, CACHE = 32, 512, 2048, 256 << 20
# Requests of the first batch, which starts the runner.
FIRST = 8
# How often a batch is looked at: each look is work for the same cores.
LOOK_S = 0.25


def offline(count: int, model: str, threads: int, rounds: int, checks: Checks) -> dict[str, Any]:
    """Tokens per second of ``count`` short requests as a batch and on the engine alone, and the share: the median over
    ``rounds``.
    """
    sides: list[tuple[float, float]] = []
    engine: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as scratch:
        weights = CHECKPOINTS / PICO if model == PICO else write_checkpoint(Path(scratch) / "model", model)
        alone = Alone(weights, threads, checks)
        with served(Path(scratch) / "home", weights, threads) as http:
            through_server(http, list(short_requests(MODEL, FIRST, tokens=TOKENS, seed=-1)), checks)
            for number in range(rounds):
                # Others each round, or their prompts would be cached.
                lines = list(short_requests(MODEL, count, tokens=TOKENS, seed=number))
                before = _engine(http)
                seconds = through_server(http, lines, checks)
                checks.require()
                engine.append({name: value - before[name] for name, value in _engine(http).items()})
                sides.append((seconds, alone.run(lines)))
    batch_s, offline_s = (statistics.median(side) for side in zip(*sides, strict=True))
    return {
        "requests": count,
        "model": model,
        "threads": threads,
        "batch_s": round(batch_s, 2),
        "offline_s": round(offline_s, 2),
        "batch_tokens_per_s": round(count * TOKENS / batch_s, 1),
        "offline_tokens_per_s": round(count * TOKENS / offline_s, 1),
        "share": round(statistics.median(alone_s / seconds for seconds, alone_s in sides), 3),
        "engine": {name: round(statistics.median(one[name] for one in engine), 2) for name in engine[0]},
    }


def _engine(http: httpx.Client) -> dict[str, float]:
    """Seconds of the worker's engine so far, and its steps."""
    [worker] = http.get("/v1/status").raise_for_status().json()["models"][MODEL]["workers"]
    threads = (task / "schedstat" for task in Path(f"/proc/{worker['pid']}/task").iterdir())
    ran, waited = max([int(number) * 1e-9 for number in stat.read_text().split()[:2]] for stat in threads)
    busy = worker["busy_seconds"]
    return {
        "steps": worker["steps"], "busy_s": busy, "ran_s": ran, "waited_s": waited, "held_up_s": busy - ran - waited
    }  # fmt: skip


@contextlib.contextmanager
def served(home: Path, weights: Path, threads: int) -> Iterator[httpx.Client]:
    """A client of a server that has this model alone."""
    from serve_app.catalog.load import BUILT_IN

    (home / "models").mkdir(parents=True, mode=0o700)
    record = yaml.safe_load((BUILT_IN / f"{PICO}.yaml").read_text())
    del record["draft"]
    decode = {
        "max_replicas": 1, "num_cpus": 0.25, "cpu_threads": threads, "kv_cache_bytes": CACHE,
        "max_batch_tokens": STEP, "max_num_seqs": PLACES,
    }  # fmt: skip
    record |= {"id": MODEL, "weights": {"path": str(weights)}, "dtype": _dtype(weights)}
    record["properties"]["context_window"] = CONTEXT
    record["serving"] = {"local": {"decode": decode}}
    (home / "models" / "batch.yaml").write_text(yaml.safe_dump(record))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with local_stack(port, SERVE_APP_HOME=str(home), SERVE_APP_MODELS=MODEL) as stack:
        headers = {"Authorization": f"Bearer {stack.key}"}
        with httpx.Client(base_url=stack.url, headers=headers, timeout=120) as http:
            yield http


def through_server(http: httpx.Client, lines: list[bytes], checks: Checks) -> float:
    """Seconds that the batch takes; its answers are checked."""
    files = {"file": ("input.jsonl", b"\n".join(lines), "application/jsonl")}
    sent = http.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
    asked = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    began = time.perf_counter()
    batch = http.post("/v1/batches", json=asked).raise_for_status().json()
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(LOOK_S)
        batch = http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    seconds = time.perf_counter() - began
    if checks.equal("status of the batch", batch["status"], "completed"):
        rows = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        check_answers([json.loads(row) for row in rows], lines, checks)
    return seconds


def check_answers(rows: list[dict[str, Any]], lines: list[bytes], checks: Checks) -> None:
    """One answer for each request, in their order, each as long as was asked for."""
    wanted = [json.loads(line)["custom_id"] for line in lines]
    checks.equal("ids of the answers", [row["custom_id"] for row in rows], wanted)
    for row in rows:
        checks.equal("tokens of an answer", row["response"]["body"]["usage"]["completion_tokens"], TOKENS)


class Alone:
    """The engine in this process, as the worker has it."""

    def __init__(self, weights: Path, threads: int, checks: Checks) -> None:
        import torch

        from serve_app.engine.build import EngineLimits, build_engine
        from serve_app.models.load import load_causal_lm
        from serve_app.text.tokenizer import Tokenizer

        torch.set_num_threads(threads)
        self._checks = checks
        self._tokenizer = Tokenizer(weights)
        model = load_causal_lm(weights, dtype=_dtype(weights))
        self._engine = build_engine(model, EngineLimits(CACHE, STEP, PLACES, CONTEXT))

    def run(self, lines: list[bytes]) -> float:
        """Seconds until all of them are answered."""
        from serve_app.api.openai.read import parse_chat
        from serve_app.api.types import ModelLimits
        from serve_app.engine.request import Request
        from serve_app.text.prompt import prompt_ids

        asked = [parse_chat(json.loads(line)["body"], ModelLimits()) for line in lines]
        prompts = [prompt_ids(self._tokenizer, request).tolist() for request in asked]
        counts = [0] * len(prompts)
        began = time.perf_counter()
        for number, (request, prompt) in enumerate(zip(asked, prompts, strict=True)):
            self._engine.add(Request(str(number), prompt, len(prompt), request.sampling, b"offline"))
        while self._engine.has_work:
            for output in self._engine.step():
                counts[int(output.request_id)] += len(output.token_ids)
        seconds = time.perf_counter() - began
        self._checks.equal("tokens of each answer offline", set(counts), {TOKENS})
        return seconds


def _dtype(weights: Path) -> str:
    return "float32" if weights.name == PICO else "bfloat16"
