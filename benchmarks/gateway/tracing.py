"""What exporting traces adds to a request, in microseconds of the processor.

``python -m benchmarks tracing [--requests 5000] [--rounds 21] [--ratio 0.1] [--json]``. The trace record of requests is
written as the gateway writes it: once with OTLP export to a receiver in another process, which parses what it gets, and
once without. Every request comes with a ``traceparent``. ``process_us`` is of all threads of the gateway's process, the
one that converts and sends among them, until all is sent; ``loop_us`` of the thread that runs requests. Both are the
difference of the two sides, and in per cent of what a gateway's process takes for a whole answer of one token, which is
measured in the same run on the stack that ``benchmarks gateway`` has. It ends with status 1 above 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import secrets
import statistics
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from benchmarks.checks import Checks
from benchmarks.gateway import gateway
from benchmarks.serving.processes import cpu_seconds
from serve_app.api.trace_context import read_traceparent, traceresponse
from serve_app.catalog.tasks import declared
from serve_app.gateway.tracing.export import Otlp, Tracing, tracing
from serve_app.state.kept.traces import Trace

TARGET_PERCENT = 2.0
WHOLE = gateway.Case(1, False, 32, 1000)
SPANS = ["chat @cf/a/b", "queue", "prefill", "hand-over", "decode"]
PATH = {"handover_s": 0.001, "handover_at_s": 0.01, "ttft_s": 0.02}


def receive(told: Any) -> None:
    """A receiver: tells its port, and at a GET how many spans of each name it has."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    counts: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for group in sent.resource_spans:
                for scope in group.scope_spans:
                    for span in scope.spans:
                        counts[span.name] = counts.get(span.name, 0) + 1
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(counts).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        told.put(server.server_address[1])
        server.serve_forever()


def request(exporting: Tracing) -> None:
    """One request as the gateway tells of it."""
    request_id, known = secrets.token_hex(16), read_traceparent(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")
    assert known is not None
    # The client's flag would overrule the ratio.
    context = None if secrets.randbelow(2) else known
    if context is not None:
        # As the middleware of the gateway asks, and once more at the end.
        traceresponse(request_id, context, sampled=exporting.sampled(request_id, context))
    prompt, answer, own = random.randrange(20, 4000), random.randrange(1, 257), 32 * random.randrange(1, 100)
    path = PATH | {"own": own, "prefilled": prompt, "bytes": own << 12, "early_bytes": own << 11}
    path |= {"drafted_tokens": answer, "accepted_tokens": answer * 3 // 4}
    trace = Trace(request_id, "local", "@cf/a/b", task=next(iter(declared())), context=context)
    trace.event("received", prompt_tokens=own + prompt, max_tokens=256)
    trace.event("queued", ahead_tokens=own)
    trace.event("routed", why="kv", decode="d1", prefill="p1", expected_ttft_ms=12.5, expected_uncached_tokens=prompt)
    trace.event("first token", cached_tokens=own)
    trace.event("decoded", replica="d1", **path)
    trace.end("done", cached_tokens=own, completion_tokens=answer)
    trace.packed()
    exporting.ended(trace)


def side(exporting: Tracing, requests: int) -> tuple[float, float]:
    """Microseconds of this thread, and of the process, a request."""
    loop, process = time.thread_time_ns(), time.process_time_ns()
    for _ in range(requests):
        request(exporting)
    took = time.thread_time_ns() - loop
    if isinstance(exporting, Otlp):
        exporting.flush()
    return took / 1e3 / requests, (time.process_time_ns() - process) / 1e3 / requests


def request_us(port: int, case: gateway.Case = WHOLE) -> float:
    """Microseconds of processor time that a gateway's process takes for a request, once it is warm."""
    checks = Checks()
    with gateway.servers(port) as key:
        target = gateway.Target(port, gateway.ROUTE, key, ours=True)
        gateway.wait_ready({"ours": target}, {})
        took = []
        for _ in range(2):
            before = gateways_s()
            for status, answer in asyncio.run(gateway.ask(target, case)).answers:
                checks.add("a whole answer", target.problem(case, status, answer))
            took.append(gateways_s() - before)
    checks.require()
    return 1e6 * took[-1] / case.requests


def gateways_s() -> float:
    """Processor seconds so far of the gateways below this process."""
    return sum(took for name, took in cpu_seconds(os.getpid()).items() if "ServeReplica:gateway:" in name)


def measure(
    requests: int, rounds: int, ratio: float, url: str, counted: Callable[[], dict[str, int]], whole_us: float
) -> dict[str, Any]:
    """Figures of both sides, after the receiver has been asked what it got, in per cent of ``whole_us`` a request."""
    os.environ |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        # The ratio for all, whatever flag a client sends.
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(ratio),
        "OTEL_BSP_MAX_QUEUE_SIZE": str(max(2048, requests)),
    }
    on, off, checks = tracing(), Tracing(), Checks()
    assert isinstance(on, Otlp)
    loop, process = [], []
    for number in range(rounds + 1):
        order = (on, off) if number % 2 else (off, on)
        took = {each is on: side(each, requests) for each in order}
        loop.append(took[True][0] - took[False][0])
        process.append(took[True][1] - took[False][1])
    on.close()
    got, all_of_them = counted(), requests * (rounds + 1)
    checks.equal("kinds of spans", sorted(got), sorted(SPANS))
    checks.equal("spans of each kind", len(set(got.values())), 1)
    share = got[SPANS[0]] / all_of_them
    # Within six deviations of the ratio.
    near = abs(share - ratio) <= 6 * (ratio * (1 - ratio) / all_of_them) ** 0.5 + 1e-9
    checks.equal("sampled as asked", near, True)
    # The first round makes what the others find.
    found = {"loop_us": statistics.median(loop[1:]), "process_us": statistics.median(process[1:])}
    found |= {f"{name}_percent": 100 * found[f"{name}_us"] / whole_us for name in ("loop", "process")}
    found |= {"request_us": whole_us, "ratio": ratio, "sampled": share, "spans": sum(got.values())}
    return found | {"answers_checked": checks.require()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="of a round (default 5000)")
    parser.add_argument("--rounds", type=int, default=21, help="of each side, by turns (default 21)")
    parser.add_argument("--ratio", type=float, default=0.1, help="of requests that are sampled (default 0.1)")
    parser.add_argument("--port", type=int, default=8231, help="of the stack (default 8231)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    asked = parser.parse_args()
    import httpx

    whole_us = request_us(asked.port)
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    receiver = context.Process(target=receive, args=(told,), daemon=True)
    receiver.start()
    try:
        url = f"http://127.0.0.1:{told.get(timeout=60)}"
        found = measure(asked.requests, asked.rounds, asked.ratio, url, lambda: httpx.get(url).json(), whole_us)
    finally:
        receiver.terminate()
        receiver.join()
    if asked.json:
        print(json.dumps(found))
    else:
        print(f"a request: {found['loop_us']:.1f} us of its thread, {found['process_us']:.1f} us of all")
        shares = f"{found['loop_percent']:.2f} % and {found['process_percent']:.2f} %"
        print(f"its share of {found['request_us']:.0f} us: {shares}")
    return int(found["process_percent"] > TARGET_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
