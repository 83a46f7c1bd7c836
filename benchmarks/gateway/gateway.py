"""What the gateway costs per request and per token, beside plain Ray Serve ingresses, LiteLLM, and a route that does
nothing.

``python -m benchmarks gateway [--rounds 3] [--litellm PYTHON] [--json]``. The engine is simulated: a decode deployment
that answers every request with fixed token ids at once, over the product's own token channel. Gateway, handles, channel
and HAProxy are the real ones, as is the load generator's share of the same cores. ``plain`` is FastAPI in a Serve
ingress beside ours, with HAProxy and our settings of Serve; ``plain-default`` the same code as ``serve.run`` starts it;
LiteLLM has an OpenAI server behind it that answers at once. All of them run for all of the time, and are asked in turn.

Every answer of every side is compared, text and number of tokens, with the one that its engine gives; a single wrong
one ends the benchmark without figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks, chat_problem, first_problem, stream_problem
from benchmarks.gateway.load import Outcome, load
from benchmarks.gateway.sides import Side, litellm, plain_default, plain_ingress, plain_text
from benchmarks.gateway.simulated import MODEL, answer_text, simulated_engine, write_record

ROUTE = "/v1/chat/completions"
STREAM_TOKENS = 50
READY_S = 60.0
# HAProxy sends requests through Serve's fallback proxy until its health checks have passed.
SETTLE_S = 5.0


@dataclass(slots=True, frozen=True)
class Case:
    tokens: int
    stream: bool
    concurrency: int
    requests: int


CASES = {
    "unary_c1": Case(1, False, 1, 200),
    "unary_c32": Case(1, False, 32, 600),
    "streams_c32": Case(STREAM_TOKENS, True, 32, 128),
    "streams_c64": Case(STREAM_TOKENS, True, 64, 192),
}
QUICK = {
    "unary_c1": Case(1, False, 1, 20),
    "streams_c8": Case(STREAM_TOKENS, True, 8, 16),
}


@dataclass(slots=True)
class Target:
    """An OpenAI chat route on this machine. ``ours``: its answers are our simulated engine's, not a plain one's."""

    port: int
    path: str
    key: str = ""
    ours: bool = False

    def problem(self, case: Case, status: int, answer: bytes) -> str | None:
        text = (answer_text if self.ours else plain_text)(case.tokens)
        return (stream_problem if case.stream else chat_problem)(status, answer, text=text, tokens=case.tokens)


@contextlib.contextmanager
def servers(port: int) -> Iterator[str]:
    """Our gateway on / and the plain ingress on /plain, in one private Ray with one HAProxy; yields the API key."""
    from serve_app.cluster import LocalCluster
    from serve_app.config import api_key, load_settings

    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as home:
        write_record(Path(home))
        settings = load_settings({"SERVE_APP_HOME": home, "PORT": str(port), "SERVE_APP_MODELS": MODEL})
        cluster = LocalCluster(settings)
        try:
            cluster.start_ray()
            from ray import serve

            serve.start(
                http_options={"host": "127.0.0.1", "port": port},
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
            serve.run_many(run_targets(settings))
            yield api_key(settings)
        finally:
            cluster.stop()


def run_targets(settings: Any, name: str = "gateway", prefix: str = "") -> list[Any]:
    """Our gateway, its simulated engine and the plain ingress, below ``prefix``."""
    from ray import serve

    from serve_app.app import gateway_application
    from serve_app.tasks.model import application_name

    return [
        serve.RunTarget(gateway_application(settings), name=name, route_prefix=prefix or "/"),
        serve.RunTarget(simulated_engine(), name=application_name(MODEL), route_prefix=None),
        serve.RunTarget(plain_ingress(), name=f"{name}-plain", route_prefix=f"{prefix}/plain"),
    ]


def body(tokens: int, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "What does itertools.chain do?"}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream}).encode()


async def ask(target: Target, case: Case) -> Outcome:
    headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
    told, host = body(case.tokens, case.stream), "127.0.0.1"
    return await load(
        host, target.port, target.path, headers, told, concurrency=case.concurrency, requests=case.requests
    )


def summary(case: Case, outcome: Outcome) -> dict[str, float]:
    return {
        "requests_per_s": outcome.rate,
        "p50_ms": outcome.p50_ms,
        "tokens_per_s": outcome.rate * case.tokens,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--litellm", help="python of an environment with litellm[proxy], to measure it as well")
    parser.add_argument("--quick", action="store_true", help="one round of a few requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    port = arguments.port
    targets = {"ours": Target(port, ROUTE, ours=True), "plain": Target(port, f"/plain{ROUTE}")}
    targets["plain-default"] = Target(port + 1, ROUTE)
    sides: dict[str, list[Side]] = {}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-app-bench-")))
        stack.callback(stop, sides)
        sides["plain-default"] = [plain_default(port + 1, logs)]
        key = stack.enter_context(servers(port))
        for target in targets.values():
            target.key = key
        if arguments.litellm:
            targets["litellm"] = Target(port + 2, ROUTE, f"sk-{key}")
            sides["litellm"] = litellm(arguments.litellm, port + 2, port + 3, MODEL, key, logs)
        wait_ready(targets, sides)
        time.sleep(SETTLE_S)
        cases, rounds = (QUICK, 1) if arguments.quick else (CASES, arguments.rounds)
        results = compare(targets, cases, rounds, Target(port, "/plain/noop", key))
    report(results)
    if arguments.json:
        print(json.dumps({"benchmark": "gateway", "engine": "simulated", **results}))
    return 0


def stop(sides: dict[str, list[Side]]) -> None:
    for processes in sides.values():
        for side in processes:
            side.stop()


def wait_ready(targets: dict[str, Target], sides: dict[str, list[Side]]) -> None:
    """Until all give right answers; raises :class:`SystemExit` with what one gives instead."""
    case = Case(2, True, 4, 16)
    for name, target in targets.items():
        until = time.monotonic() + READY_S + 60.0 * (name in sides)
        while True:
            outcome = asyncio.run(ask(target, case))
            problem = first_problem(target.problem(case, *answer) for answer in outcome.answers)
            if problem is None:
                break
            for side in sides.get(name, []):
                side.check()
            if time.monotonic() > until:
                raise SystemExit(f"no figures: {name} does not get ready: {problem}")
            time.sleep(0.5)


def compare(targets: dict[str, Target], cases: dict[str, Case], rounds: int, noop: Target) -> dict[str, Any]:
    """The cases of all targets in turn, round by round; medians, once every answer has been found right."""
    checks = Checks()
    runs: dict[str, dict[str, list[dict[str, float]]]] = {t: {c: [] for c in cases} for t in targets}
    nothing, nobody = [], Case(1, False, 1, max(case.requests for case in cases.values() if case.concurrency == 1))
    for _ in range(rounds):
        for name, case in cases.items():
            for side, target in targets.items():
                outcome = asyncio.run(ask(target, case))
                for answer in outcome.answers:
                    checks.add(f"{side}, {name}", target.problem(case, *answer))
                runs[side][name].append(summary(case, outcome))
        outcome = asyncio.run(ask(noop, nobody))
        for answer in outcome.answers:
            checks.equal("a route that does nothing", answer, (200, b'{"ok":true}'))
        nothing.append(outcome.p50_ms)
    results: dict[str, Any] = {"answers_checked": checks.require()}
    for side, by_case in runs.items():
        results[side] = {
            name: {figure: statistics.median(run[figure] for run in found) for figure in found[0]}
            for name, found in by_case.items()
        }
    results["noop_p50_ms"] = statistics.median(nothing)
    results["added_p50_ms"] = results["ours"]["unary_c1"]["p50_ms"] - results["noop_p50_ms"]
    results["ratios"] = {
        side: {name: f["requests_per_s"] / results[side][name]["requests_per_s"] for name, f in results["ours"].items()}
        for side in targets.keys() - {"ours"}
    }
    return results


def report(results: dict[str, Any]) -> None:
    sides = ["ours", *results["ratios"]]
    for side in sides:
        for case, figures in results[side].items():
            print(f"{side:13} {case:12} " + ", ".join(f"{what} {value:.1f}" for what, value in figures.items()))
    for side, ratios in results["ratios"].items():
        print(f"ours / {side}: " + ", ".join(f"{case} {ratio:.1f}x" for case, ratio in ratios.items()))
    print(f"a route that does nothing: p50 {results['noop_p50_ms']:.2f} ms; ours adds {results['added_p50_ms']:.2f} ms")
    print(f"{results['answers_checked']} answers checked, all right")


if __name__ == "__main__":
    sys.exit(main())
