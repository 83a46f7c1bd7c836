"""A model without replicas: from the request to its first token, and what its client hears meanwhile.

``python -m benchmarks from_zero [--rounds 3] [--json]`` starts the local stack with pico-instruct under a name of its
own and no replicas at rest. Each round asks for a stream and notes when the first comment and the first token come;
half a second later, asks without patience and notes what it is told; and waits until the replicas have gone. Every
answer must be pico-instruct's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT
from benchmarks.checks import Checks, chat_problem, stream_problem
from benchmarks.serving.processes import descendants
from benchmarks.serving.stack import local_stack
from benchmarks.serving.startup import ANSWER, QUESTION, TOKENS
from serve_app.api.retry_after import HEADER, wait_told

MODEL = "@cf/pico/sometimes"


def make_home(folder: Path) -> None:
    """A state directory whose catalogue has the model; compiled kernels are taken from the user's own."""
    from serve_app.config import load_settings

    record = yaml.safe_load((ROOT / "serve_app" / "catalog" / "models" / "pico-instruct.yaml").read_text())
    record |= {"id": MODEL, "weights": {"path": str(ROOT / "checkpoints" / "pico-instruct")}}
    del record["draft"]
    local = record["serving"]["local"]
    del local["draft"]
    for stage in ("decode", "prefill"):
        local[stage] |= {"min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0, "downscale_delay_s": 2}
    (folder / "models").mkdir()
    (folder / "models" / "sometimes.yaml").write_text(yaml.safe_dump(record))
    kept = load_settings({**os.environ}).home
    for name in ("kernels", "weights"):
        if (kept / name).is_dir():
            (folder / name).symlink_to(kept / name)


class Client:
    def __init__(self, url: str, key: str, model: str = MODEL) -> None:
        self.model = model
        self._url = url
        self.checks = Checks()
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def _request(self, **more: Any) -> urllib.request.Request:
        question = [{"role": "user", "content": QUESTION}]
        body = {"model": self.model, "messages": question, "max_tokens": TOKENS, **more}
        return urllib.request.Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode(), self._headers)

    def stream(self) -> dict[str, float]:
        began = time.monotonic()
        figures, body = {"comments": 0.0}, b""
        try:
            with urllib.request.urlopen(self._request(stream=True), timeout=120) as answer:
                for line in answer:
                    body += line
                    if line.startswith(b": "):
                        figures.setdefault("first_comment_s", time.monotonic() - began)
                        figures["comments"] += 1
                    elif line.startswith(b"data: {") and _has_text(json.loads(line[6:])):
                        figures.setdefault("first_token_s", time.monotonic() - began)
            self.checks.add("a stream", stream_problem(200, body, text=ANSWER))
        except urllib.error.HTTPError as error:
            self.checks.add("a stream", stream_problem(error.code, error.read()))
        self.checks.require()
        return figures

    def without_patience(self) -> float:
        """``Retry-After`` of a request that will not wait; 0 if it was answered."""
        try:
            with urllib.request.urlopen(self._request(options={"rejectIfBusy": True}), timeout=120) as answer:
                self.checks.add("a request without patience", chat_problem(200, answer.read(), text=ANSWER))
                return 0.0
        except urllib.error.HTTPError as error:
            told = wait_told(error.headers)
            right = error.code in (429, 503) and told is not None
            self.checks.that("a request without patience", right, f"status {error.code}, {HEADER} {told}")
            return float(told or 0)


def _has_text(event: dict[str, Any]) -> bool:
    """The event that opens a stream has an empty text: it is no token."""
    return any(choice["delta"].get("content") for choice in event.get("choices", ()))


def workers(server: int) -> int:
    """Engine workers among the server's processes."""
    titles = []
    for pid in descendants(server):
        with contextlib.suppress(OSError):
            titles.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return sum(title.startswith(b"ray::EngineWorker") for title in titles)


def one_round(client: Client, server: int) -> dict[str, float]:
    told: list[float] = []
    timer = threading.Timer(0.5, lambda: told.append(client.without_patience()))
    timer.start()
    figures = client.stream()
    timer.join()
    figures["retry_after_s"] = told[0]
    while workers(server):
        time.sleep(0.5)
    time.sleep(2)
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8126)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as folder:
        make_home(Path(folder))
        with local_stack(options.port, SERVE_APP_HOME=folder, SERVE_APP_MODELS=MODEL) as stack:
            time.sleep(5)
            client = Client(stack.url, stack.key)
            for number in range(options.rounds):
                rounds.append(one_round(client, stack.pid))
                client.checks.require()
                shown = ", ".join(f"{name} {value:.2f}" for name, value in rounds[-1].items())
                print(f"round {number + 1}: {shown}", flush=True)
    median = statistics.median(r["first_token_s"] for r in rounds)
    print(f"median of {options.rounds}: {median:.2f} s from the request to the first token")
    if options.json:
        print(json.dumps({"benchmark": "from_zero", "first_token_s": median, "rounds": rounds}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
