"""Models without replicas: from the request to the answer, and what its client hears meanwhile.

``python -m benchmarks from_zero [--rounds 3] [--tasks all] [--json]`` starts the local stack with pico-instruct under a
name of its own and no replicas at rest. Each round asks for a stream and notes when the first comment and the first
token come; half a second later, asks without patience and notes what it is told; and waits until the replicas have
gone. Every answer must be pico-instruct's own. With ``--tasks all``, or some names, the models of the other tasks that
run on a machine without a GPU are asked as well, once each, from zero replicas to their whole answer, which is known
(:mod:`benchmarks.serving.known`).

``--budget 2GiB`` asks all of them by turns within a memory budget instead (:mod:`benchmarks.serving.turns`).
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT
from benchmarks.checks import Checks, chat_problem, stream_problem
from benchmarks.serving import turns
from benchmarks.serving.known import Known, known
from benchmarks.serving.processes import descendants
from benchmarks.serving.stack import LocalStack, local_stack
from benchmarks.serving.startup import ANSWER, QUESTION, TOKENS
from serve_app.api.retry_after import HEADER, wait_told

MODEL = "@cf/pico/sometimes"
INSTRUCT = "@cf/pico/pico-instruct"


def make_home(folder: Path, models: list[str], downscale_s: float = 2) -> None:
    """A state directory whose catalogue has the models without replicas at rest, pico-instruct under the name
    :data:`MODEL`; compiled kernels are taken from the user's own.
    """
    from serve_app.catalog.load import load_catalog
    from serve_app.config import load_settings

    (folder / "models").mkdir()
    catalog = load_catalog()
    for number, name in enumerate(models):
        source = catalog.source(INSTRUCT if name == MODEL else name)
        record = yaml.safe_load(source.read_text())
        record["id"] = name
        if path := record["weights"].get("path"):
            record["weights"]["path"] = str(ROOT / path)
        record.pop("draft", None)
        local = record["serving"]["local"]
        local.pop("draft", None)
        for stage in local.values():
            if isinstance(stage, dict):
                stage |= {"min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0, "downscale_delay_s": downscale_s}
        (folder / "models" / f"{number}.yaml").write_text(yaml.safe_dump(record))
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

    def stream(self, hear: Callable[[bytes], None] = lambda line: None) -> dict[str, float]:
        """``hear`` gets each line."""
        began = time.monotonic()
        figures, body = {"comments": 0.0}, b""
        try:
            with urllib.request.urlopen(self._request(stream=True), timeout=120) as answer:
                for line in answer:
                    body += line
                    hear(line)
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
    """Models' workers among the server's processes."""
    titles = []
    for pid in descendants(server):
        with contextlib.suppress(OSError):
            titles.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    kinds = tuple(kind.encode() for kind in turns.WORKERS)
    return sum(title.startswith(kinds) for title in titles)


def one_round(client: Client, server: int) -> dict[str, float]:
    told: list[float] = []
    timer = threading.Timer(0.5, lambda: told.append(client.without_patience()))
    timer.start()
    figures = client.stream()
    timer.join()
    figures["retry_after_s"] = told[0]
    wait_for_none(server)
    return figures


def wait_for_none(server: int) -> None:
    """Until no worker is up."""
    while workers(server):
        time.sleep(0.5)
    time.sleep(2)


def one_task(asked: Known, stack: LocalStack, checks: Checks) -> float:
    """Seconds from the request to the whole answer."""
    began = time.monotonic()
    checks.add(asked.model, asked.ask(stack.url, stack.key))
    seconds = time.monotonic() - began
    checks.require()
    wait_for_none(stack.pid)
    return seconds


def chosen(names: str) -> list[Known]:
    """Of the models that have a known answer, but pico-instruct: ``all``, or those whose task or model is named."""
    others = [each for each in known() if each.model != INSTRUCT]
    wanted = {name for name in names.split(",") if name}
    found = others if names == "all" else [each for each in others if {each.task, each.model} & wanted]
    if missing := wanted - {"all"} - {name for each in found for name in (each.task, each.model)}:
        raise SystemExit(f"no model with a known answer: {', '.join(sorted(missing))}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", default="", help="all, or names of tasks and models: these are asked as well")
    parser.add_argument("--budget", help="ask all models by turns within a memory budget, such as 2GiB")
    parser.add_argument("--turns", type=int, default=2, help="with --budget, how often each is asked")
    parser.add_argument("--port", type=int, default=8126)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    if options.budget:
        return by_turns(options)
    rounds, tasks, others = [], {}, chosen(options.tasks)
    names = [MODEL, *(each.model for each in others)]
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as folder:
        make_home(Path(folder), names)
        with local_stack(options.port, SERVE_APP_HOME=folder, SERVE_APP_MODELS=",".join(names)) as stack:
            time.sleep(5)
            client = Client(stack.url, stack.key)
            for number in range(options.rounds):
                rounds.append(one_round(client, stack.pid))
                client.checks.require()
                shown = ", ".join(f"{name} {value:.2f}" for name, value in rounds[-1].items())
                print(f"round {number + 1}: {shown}", flush=True)
            for each in others:
                tasks[each.model] = {"task": each.task, "answer_s": one_task(each, stack, client.checks)}
                print(f"{each.task} {each.model}: {tasks[each.model]['answer_s']:.2f} s", flush=True)
    median = statistics.median(r["first_token_s"] for r in rounds)
    print(f"median of {options.rounds}: {median:.2f} s from the request to the first token")
    if options.json:
        told = {"benchmark": "from_zero", "first_token_s": median, "rounds": rounds}
        print(json.dumps(told | ({"tasks": tasks} if tasks else {})))
    return 0


def by_turns(options: argparse.Namespace) -> int:
    """``--budget``."""
    asked = [replace(each, model=MODEL) if each.model == INSTRUCT else each for each in known()]
    if options.tasks not in ("", "all"):
        asked = chosen(options.tasks)
    names = [each.model for each in asked]
    # Only the budget sends anybody away.
    found = turns.run(lambda home: make_home(home, names, 3600), asked, options.budget, options.turns, options.port)
    print(
        f"{len(asked)} models in {found.budget / 2**20:.0f} MiB: at most {found.peak / 2**20:.0f} MiB in "
        f"{found.workers} workers ({found.samples} samples), {found.moves['wakes']} wakes, all answers right"
    )
    if options.json:
        print(json.dumps({"benchmark": "from_zero", **found.shown()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
