"""From `serve-app serve` to the first token, as a person at the keyboard has it.

``python -m benchmarks startup [--rounds 3] [--json]``. The first round may fetch weights and compile kernels; it is
reported apart. Every round starts and ends the whole local stack. ``cpu_s`` is what all processes had used at the first
token, ``idle_cpu_share`` what they use of one core once all is loaded and nobody asks (``--processes``: which of them).
The first stream must be complete and right: pico-instruct's own words, up to their end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

from benchmarks.checks import Checks, stream_problem
from benchmarks.serving.processes import cpu_seconds, memory_mib

MODEL = "@cf/pico/pico-instruct"
QUESTION, TOKENS, ANSWER = "What does itertools.chain do?", 8, "`itertools.chain` returns an iterator"
# After loading, before it is called idle.
SETTLE_S = 5.0


def first_token(url: str, key: str, checks: Checks) -> float | None:
    """When a streamed chat gave its first line, on the monotonic clock; None while the server is not there yet."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "stream": True, "max_tokens": TOKENS}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            line, came = answer.readline(), time.monotonic()
            checks.add("the first stream", stream_problem(answer.status, line + answer.read(), text=ANSWER))
            return came
    except urllib.error.HTTPError as error:
        if error.code != 503:  # what it says as long as the model loads
            checks.add("the first stream", stream_problem(error.code, error.read()))
            return time.monotonic()
        return None
    except OSError:
        return None


def all_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def one_round(port: int, key: str, idle_s: float, processes: bool, settle_s: float = SETTLE_S) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PORT": str(port), "SERVE_APP_API_KEY": key}
    started = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli", "serve"], env=environment, stdout=subprocess.DEVNULL
    )
    figures: dict[str, float] = {}
    checks = Checks()
    try:
        while (came := first_token(url, key, checks)) is None:
            if server.poll() is not None:
                raise SystemExit("the server ended by itself; run `serve-app serve` to see why")
            time.sleep(0.1)
        checks.require()
        figures["first_token_s"] = came - started
        figures["cpu_s"] = sum(cpu_seconds(server.pid).values())
        while not all_ready(url):
            time.sleep(0.1)
        figures["all_ready_s"] = time.monotonic() - started
        figures["memory_mib"] = sum(memory_mib(server.pid).values())
        time.sleep(settle_s)
        before = cpu_seconds(server.pid)
        time.sleep(idle_s)
        used = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_seconds(server.pid).items()}
        figures["idle_cpu_share"] = sum(used.values()) / idle_s
        if processes:
            for name, seconds in sorted(used.items(), key=lambda pair: -pair[1]):
                print(f"  {100 * seconds / idle_s:5.2f} %  {name}")
    finally:
        ending = time.monotonic()
        server.send_signal(signal.SIGINT)
        server.wait(60)
        figures["stop_s"] = time.monotonic() - ending
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after a first one that warms caches")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--idle", type=float, default=10, metavar="S", help="how long to look at it idle")
    parser.add_argument("--processes", action="store_true", help="print each process's share of a core while idle")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    key = "benchmark-" + os.urandom(12).hex()
    rounds = []
    for number in range(arguments.rounds + 1):
        figures = one_round(arguments.port, key, arguments.idle, arguments.processes)
        print(("first start" if number == 0 else f"round {number}") + f": {_shown(figures)}", flush=True)
        rounds.append(figures)
    medians = {name: statistics.median(r[name] for r in rounds[1:] or rounds) for name in rounds[0]}
    print(f"median of {arguments.rounds}: {_shown(medians)}")
    if arguments.json:
        print(json.dumps({"benchmark": "startup", "first": rounds[0], "median": medians, "rounds": rounds[1:]}))
    return 0


def _shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in figures.items())


if __name__ == "__main__":
    raise SystemExit(main())
