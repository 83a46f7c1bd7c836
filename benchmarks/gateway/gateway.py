"""What the gateway costs per request and per token, beside plain Ray Serve ingresses, LiteLLM, and a route that does
nothing.

``python -m benchmarks gateway [--rounds 3] [--litellm PYTHON] [--json]``. The engine is simulated: a decode deployment
that answers every request with fixed token ids at once, over the product's own token channel. Gateway, handles, channel
and HAProxy are the real ones, as is the load generator's share of the same cores. ``plain`` is FastAPI in a Serve
ingress beside ours, with HAProxy and our settings of Serve; ``plain-default`` the same code as ``serve.run`` starts it;
LiteLLM has an OpenAI server behind it that answers at once. All of them run for all of the time, and are asked in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.gateway.load import Outcome, load
from benchmarks.gateway.sides import Side, litellm, plain_default, plain_ingress

MODEL = "@cf/pico/pico-instruct"
STREAM_TOKENS = 50


def fake_decode() -> Any:
    """The simulated engine: as many tokens as asked for, one frame each, then the unary result."""
    import ray
    from ray import serve

    @serve.deployment(name="Decode", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.25})
    class FakeDecode:
        def __init__(self) -> None:
            from serve_app.channel.sender import TokenSender

            self._sender = TokenSender(ray.get_runtime_context().get_actor_id())

        async def generate(self, wire: dict[str, Any]) -> dict[str, Any]:
            from serve_app.channel.frames import InboxAddress, TokenItem

            count = wire["sampling"].get("max_tokens", 256)
            self._sender.open(wire["id"], InboxAddress.from_wire(wire["inbox"]), wire["resumed"])
            for index in range(count):
                finish = "length" if index == count - 1 else None
                self._sender.send([TokenItem(wire["id"], index, (300 + index,), finish, None)])
                await asyncio.sleep(0)
            rest = [item.to_wire() for item in self._sender.undelivered(wire["id"])]
            self._sender.close(wire["id"])
            return {"finish": "length", "cached": 0, "undelivered": rest}

        async def all_stats(self, wire: dict[str, Any]) -> list[dict[str, Any]]:
            return []

    return FakeDecode.bind()


class Servers:
    """Our gateway on / and the plain ingress on /plain, in one private Ray with one HAProxy."""

    def __init__(self, port: int) -> None:
        from serve_app.cluster import LocalCluster
        from serve_app.config import api_key, load_settings

        home = tempfile.mkdtemp(prefix="serve-app-bench-")
        self.settings = load_settings({"SERVE_APP_HOME": home, "PORT": str(port), "SERVE_APP_MODELS": MODEL})
        self.cluster = LocalCluster(self.settings)
        self.key = api_key(self.settings)
        self.port = port

    def start(self) -> None:
        self.cluster.start_ray()
        from ray import serve

        from serve_app.app import gateway_application
        from serve_app.gateway.models import application_name

        serve.start(
            http_options={"host": "127.0.0.1", "port": self.port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        serve.run_many(
            [
                serve.RunTarget(gateway_application(self.settings), name="gateway", route_prefix="/"),
                serve.RunTarget(fake_decode(), name=application_name(MODEL), route_prefix=None),
                serve.RunTarget(plain_ingress(), name="plain", route_prefix="/plain"),
            ]
        )

    def stop(self) -> None:
        self.cluster.stop()


def body(tokens: int, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "What does itertools.chain do?"}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream}).encode()


@dataclass(slots=True)
class Target:
    """An OpenAI chat route on this machine."""

    port: int
    path: str
    key: str = ""


async def measure(target: Target, tokens: int, stream: bool, concurrency: int, requests: int) -> Outcome:
    headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
    told = body(tokens, stream)
    return await load("127.0.0.1", target.port, target.path, headers, told, concurrency=concurrency, requests=requests)


CASES = {
    # name: (tokens, stream, concurrency, requests)
    "unary_c1": (1, False, 1, 200),
    "unary_c32": (1, False, 32, 600),
    "streams_c32": (STREAM_TOKENS, True, 32, 128),
    "streams_c64": (STREAM_TOKENS, True, 64, 192),
}


def summary(outcome: Outcome) -> dict[str, float]:
    return {
        "requests_per_s": outcome.rate,
        "p50_ms": outcome.p50_ms,
        "events_per_s": outcome.events / outcome.seconds,
        "errors": outcome.errors,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks gateway", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--litellm", help="python of an environment with litellm[proxy], to measure it as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    port, route = arguments.port, "/v1/chat/completions"
    targets = {"ours": Target(port, route), "plain": Target(port, f"/plain{route}")}
    targets["plain-default"] = Target(port + 1, route)
    sides = [plain_default(port + 1)]
    servers = Servers(port)
    try:
        servers.start()
        for target in targets.values():
            target.key = servers.key
        if arguments.litellm:
            targets["litellm"] = Target(port + 2, route, f"sk-{servers.key}")
            sides += litellm(arguments.litellm, port + 2, port + 3, MODEL, servers.key)
        _warm_up(targets, {"plain-default": sides[0], "litellm": sides[-1]})
        results = _rounds(targets, arguments.rounds)
        noop = [
            asyncio.run(measure(Target(port, "/plain/noop", servers.key), 1, False, 1, 200)).p50_ms
            for _ in range(arguments.rounds)
        ]
    finally:
        for side in sides:
            side.stop()
        servers.stop()
    results["noop_p50_ms"] = statistics.median(noop)
    results["added_p50_ms"] = results["ours"]["unary_c1"]["p50_ms"] - results["noop_p50_ms"]
    print(f"a route that does nothing: p50 {results['noop_p50_ms']:.2f} ms; ours adds {results['added_p50_ms']:.2f} ms")
    if arguments.json:
        print(json.dumps({"benchmark": "gateway", "engine": "simulated", **results}))


def _warm_up(targets: dict[str, Target], sides: dict[str, Side]) -> None:
    for name, target in targets.items():

        def answers(target: Target = target) -> bool:
            outcome = asyncio.run(measure(target, 2, True, 4, 16))
            return not outcome.errors

        if name in sides:
            sides[name].wait(answers)
        else:
            until = time.monotonic() + 60
            while not answers() and time.monotonic() < until:
                time.sleep(0.5)
    # HAProxy sends requests through Serve's fallback proxy until its health checks have passed.
    time.sleep(5)


def _rounds(targets: dict[str, Target], rounds: int) -> dict[str, Any]:
    """The cases of all targets in turn, round by round; medians."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {t: {c: [] for c in CASES} for t in targets}
    for _ in range(rounds):
        for case, (tokens, stream, concurrency, requests) in CASES.items():
            for name, target in targets.items():
                outcome = asyncio.run(measure(target, tokens, stream, concurrency, requests))
                runs[name][case].append(summary(outcome))
    results: dict[str, Any] = {}
    for name, cases in runs.items():
        results[name] = {
            case: {figure: statistics.median(r[figure] for r in found) for figure in found[0]}
            for case, found in cases.items()
        }
        for case, figures in results[name].items():
            print(f"{name:13} {case:12} " + ", ".join(f"{what} {value:.1f}" for what, value in figures.items()))
    ours = results["ours"]
    for name in results.keys() - {"ours"}:
        ratios = {c: f["requests_per_s"] / results[name][c]["requests_per_s"] for c, f in ours.items()}
        print(f"ours / {name}: " + ", ".join(f"{case} {ratio:.1f}x" for case, ratio in ratios.items()))
    return results


if __name__ == "__main__":
    sys.exit(main())
