"""What the gateway costs per request and per token, beside a plain Ray Serve ingress and a route that does nothing.

``python -m benchmarks gateway [--rounds 3] [--litellm PYTHON] [--json]``. The engine is simulated: a decode deployment
that answers every request with fixed token ids at once, over the product's own token channel. Gateway, handles, channel
and HAProxy are the real ones, as is the load generator's share of the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from benchmarks.load import Outcome, load

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


def plain_ingress() -> Any:
    """What people write first: FastAPI in a Serve ingress, a handle stream to the engine, one event per token."""
    from ray import serve

    app = FastAPI()

    @serve.deployment(name="PlainEngine", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.25})
    class PlainEngine:
        async def stream(self, count: int) -> AsyncIterator[str]:
            for index in range(count):
                yield f"word{index} "
                await asyncio.sleep(0)

    @serve.deployment(name="Plain", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.25})
    @serve.ingress(app)
    class Plain:
        def __init__(self, engine: Any) -> None:
            self._engine = engine.options(stream=True)

        @app.post("/v1/chat/completions")
        async def chat(self, body: dict) -> Any:
            words = self._engine.stream.remote(body["max_tokens"])
            if not body.get("stream"):
                text = "".join([word async for word in words])
                return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}

            async def events() -> AsyncIterator[str]:
                async for word in words:
                    yield "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": word}}]}) + "\n\n"
                yield "data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")

        @app.post("/noop")
        async def noop(self) -> dict[str, bool]:
            return {"ok": True}

    return Plain.bind(PlainEngine.bind())


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


async def measure(
    port: int, path: str, key: str, tokens: int, stream: bool, concurrency: int, requests: int
) -> Outcome:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return await load(
        "127.0.0.1", port, path, headers, body(tokens, stream), concurrency=concurrency, requests=requests
    )


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
    servers = Servers(arguments.port)
    servers.start()
    route = "/v1/chat/completions"
    targets = {"ours": (arguments.port, route), "plain": (arguments.port, f"/plain{route}")}
    proxy = None
    try:
        if arguments.litellm:
            proxy = _litellm(arguments.litellm, arguments.port, servers.key, arguments.port + 1)
            targets["litellm"] = (arguments.port + 1, "/v1/chat/completions")
        results = _rounds(targets, servers.key, arguments.rounds)
        noop = [
            asyncio.run(measure(arguments.port, "/plain/noop", servers.key, 1, False, 1, 200)).p50_ms
            for _ in range(arguments.rounds)
        ]
    finally:
        if proxy is not None:
            proxy.terminate()
        servers.stop()
    results["noop_p50_ms"] = statistics.median(noop)
    results["added_p50_ms"] = results["ours"]["unary_c1"]["p50_ms"] - results["noop_p50_ms"]
    print(f"a route that does nothing: p50 {results['noop_p50_ms']:.2f} ms; ours adds {results['added_p50_ms']:.2f} ms")
    if arguments.json:
        print(json.dumps({"benchmark": "gateway", "engine": "simulated", **results}))


def _rounds(targets: dict[str, tuple[int, str]], key: str, rounds: int) -> dict[str, Any]:
    """Warm-up, then the cases of all targets in turn, round by round; medians."""
    for port, path in targets.values():
        until = time.monotonic() + 60
        while asyncio.run(measure(port, path, key, 2, True, 4, 16)).errors and time.monotonic() < until:
            time.sleep(0.5)
    # HAProxy sends requests through Serve's fallback proxy until its health checks have passed.
    time.sleep(5)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {t: {c: [] for c in CASES} for t in targets}
    for _ in range(rounds):
        for case, (tokens, stream, concurrency, requests) in CASES.items():
            for target, (port, path) in targets.items():
                outcome = asyncio.run(measure(port, path, key, tokens, stream, concurrency, requests))
                runs[target][case].append(summary(outcome))
    results: dict[str, Any] = {}
    for target, cases in runs.items():
        results[target] = {
            case: {name: statistics.median(r[name] for r in found) for name in found[0]}
            for case, found in cases.items()
        }
        for case, figures in results[target].items():
            print(f"{target:8} {case:12} " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    return results


def _litellm(python: str, upstream: int, key: str, port: int) -> subprocess.Popen:
    """LiteLLM's proxy in front of the simulated engine behind our gateway's OpenAI route."""
    config = Path(tempfile.mkdtemp()) / "config.yaml"
    config.write_text(
        "model_list:\n"
        f"  - model_name: '{MODEL}'\n"
        f"    litellm_params: {{model: 'openai/{MODEL}', api_base: 'http://127.0.0.1:{upstream}/v1', "
        f"api_key: '{key}'}}\n"
    )
    program = str(Path(python).with_name("litellm"))
    command = [program, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})


if __name__ == "__main__":
    sys.exit(main())
