"""From the last byte of an upload to the first token through the adapter, while streams run on the same worker.

    python -m benchmarks lora --part upload [--home DIR] [--rank 32] [--batch 16] [--rounds 5]

Starts the local stack (or takes the one of ``--home``). Each round uploads an adapter that nobody has seen and asks for
a stream through it as soon as the upload is answered. Beside it ``--batch`` streams of the base run all the time, and
the largest gap between two frames of any of them is given, with uploads and without. Each answer through an adapter
must differ from the base's and be the same when it is asked for again.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import CHECKPOINTS
from benchmarks.checks import Checks
from benchmarks.lora.made import write_adapters
from benchmarks.serving.stack import LocalStack
from benchmarks.serving.startup import MODEL

FILES = ("adapter_config.json", "adapter_model.safetensors")
QUIET_S = 3.0


@dataclass(slots=True)
class Streams:
    """Streams of the base, each begun again when it has ended; ``arrived``: when frames came, of each."""

    url: str
    headers: dict[str, str]
    arrived: list[list[float]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        own = self.arrived[number]
        asked = {"prompt": f"{number}: on and on", "raw": True, "max_tokens": 1000, "stream": True, "temperature": 1}
        with httpx.Client(headers=self.headers, timeout=60) as client:
            while not self.ended.is_set():
                own.append(0.0)  # the gap between two streams is none
                with client.stream("POST", self.url, json=asked) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            own.append(time.perf_counter())
                        if self.ended.is_set():
                            break

    def gap(self, begin: float, end: float) -> float:
        """The largest between two frames of one stream, seconds."""
        found = [
            after - before
            for own in self.arrived
            for before, after in zip(own, own[1:], strict=False)
            if before and after and begin <= before and after <= end
        ]
        return max(found, default=0.0)


def ask(client: httpx.Client, lora: str | None) -> tuple[float, str]:
    """When the first token came, and the text."""
    asked = {"prompt": "What does len do?", "temperature": 0, "max_tokens": 24, "stream": True}
    first, text = 0.0, ""
    with client.stream("POST", f"/run/{MODEL}", json=asked | ({"lora": lora} if lora else {})) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"no figures: {answer.status_code} {answer.read()[:200]!r}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter()
                text += json.loads(line[6:]).get("response") or ""
    return first, text


def measure(stack: LocalStack, folder: Path, rank: int, streams: int, rounds: int) -> dict[str, Any]:
    checks = Checks()
    base, headers = f"{stack.url}/client/v4/accounts/local/ai", {"Authorization": f"Bearer {stack.key}"}
    made = write_adapters(CHECKPOINTS / "pico-instruct", folder, rounds, rank)
    beside = Streams(f"{base}/run/{MODEL}", headers, [[] for _ in range(streams)])
    threads = [threading.Thread(target=beside.run, args=(number,)) for number in range(streams)]
    took: list[float] = []
    with httpx.Client(base_url=base, headers=headers, timeout=60) as client:
        _, plain = ask(client, None)
        for thread in threads:
            thread.start()
        try:
            time.sleep(QUIET_S)
            start = time.perf_counter()
            time.sleep(QUIET_S)
            middle = time.perf_counter()
            for number, adapter in enumerate(made):
                name = f"bench-{time.time_ns()}"
                client.post("/finetunes", json={"model": MODEL, "name": name}).raise_for_status()
                for file in FILES:
                    data = (adapter / file).read_bytes()
                    sent = client.post(
                        f"/finetunes/{name}/finetune-assets", data={"file_name": file}, files={"file": (file, data)}
                    )
                    sent.raise_for_status()
                uploaded = time.perf_counter()
                first, text = ask(client, name)
                took.append(first - uploaded)
                checks.that(f"adapter {number}", text != plain, "answers as the base does")
                checks.equal(f"adapter {number}, again", ask(client, name)[1], text)
                client.delete(f"/finetunes/{name}").raise_for_status()
            end = time.perf_counter()
        finally:
            beside.ended.set()
            for thread in threads:
                thread.join()
    checks.require()
    return {
        "adapter_mb": (made[0] / FILES[1]).stat().st_size / 1e6, "rounds": rounds, "streams": streams,
        "upload_to_first_token_s": statistics.median(took), "worst_s": max(took),
        "largest_gap_s": beside.gap(start, middle), "largest_gap_while_uploading_s": beside.gap(middle, end),
    }  # fmt: skip
