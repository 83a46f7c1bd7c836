"""What is measured: commands, and the rows of the README's table that each of them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Found = dict[str, Any]  # the JSON object that a command prints last
Meets = Callable[[list[float]], bool]


@dataclass(slots=True, frozen=True)
class Row:
    """One line of the table. ``value(found)`` is a number, or some that all have to meet the target; ``shown`` formats
    each, ``meets`` takes all. A ``peer`` is one of the measurement's: without it there is nothing to compare with.
    """

    what: str
    value: Callable[[Found], float | list[float]]
    shown: str
    target: str
    meets: Meets
    peer: str | None = None


@dataclass(slots=True, frozen=True)
class Measurement:
    """``command`` follows ``python -m``; ``{name}`` in it is a folder or file of :mod:`benchmarks.figures.places`.
    ``quick`` takes its place where only the machinery is tried. ``peers``: what each adds where it is installed.
    """

    name: str
    command: str
    quick: str
    rows: tuple[Row, ...]
    peers: tuple[tuple[str, str], ...] = ()


def at_least(*limits: float) -> Meets:
    """One limit for all values, or one for each."""
    return lambda values: all(value >= limit for value, limit in _pairs(values, limits))


def at_most(*limits: float) -> Meets:
    return lambda values: all(value <= limit for value, limit in _pairs(values, limits))


def none() -> Meets:
    return lambda values: not any(values)


def _pairs(values: list[float], limits: tuple[float, ...]) -> Iterator[tuple[float, float]]:
    return zip(values, limits if len(limits) > 1 else limits * len(values), strict=True)


def _ratios(peer: str) -> Callable[[Found], list[float]]:
    return lambda found: list(found["ratios"][peer].values())


def _engine(peer: str) -> Callable[[Found], list[float]]:
    return lambda found: [load["ratio"][peer] for load in found["workloads"].values()]


def _compared(field: str, *rates: str) -> Callable[[Found], list[float]]:
    """Of the trace's comparison, at ``rates`` or all."""

    def value(found: Found) -> list[float]:
        by_rate = {name: row for name, row in found["compared"].items() if name.startswith("x")}
        return [by_rate[rate][field] for rate in by_rate if not rates or rate in rates]

    return value


def _speculation(text: str) -> Callable[[Found], list[float]]:
    return lambda found: [sides["ngram+draft"]["ratio"] for sides in found["workloads"][text].values()]


MEASUREMENTS = (
    Measurement(
        "startup",
        "benchmarks startup --rounds 2",
        "benchmarks startup --rounds 0 --idle 1",
        (
            Row("second start to the first streamed token",
                lambda f: f["median"]["first_token_s"], "{:.1f} s", "at most 10 s", at_most(10)),
            Row("idle, share of one core", lambda f: 100 * f["median"]["idle_cpu_share"], "{:.0f} %",
                "at most 20 %", at_most(20)),
        ),
    ),
    Measurement(
        "from_zero",
        "benchmarks from_zero",
        "benchmarks from_zero --rounds 1",
        (
            Row("a model without replicas, from the request to its first token",
                lambda f: f["first_token_s"], "{:.1f} s", "at most 6 s", at_most(6)),
        ),
    ),
    Measurement(
        "chaos",
        "benchmarks chaos --faults gateway-killed --every 45 --minutes 3 --clients 8",
        "benchmarks chaos --faults gateway-killed --every 5 --minutes 0.3 --clients 2 --recovery 60",
        (
            Row("three minutes of 8 clients that leave and gateways that are killed: answers lost, repeated or changed",
                lambda f: f["broken"], "{:.0f}", "none", none()),
        ),
    ),
    Measurement(
        "cancellation",
        "benchmarks cancellation",
        "benchmarks cancellation --requests 2",
        (
            Row("from a client's leaving to the free place in the engine, median / 99th percentile",
                lambda f: [f["streamed"]["p50_ms"], f["streamed"]["p99_ms"]], "{:.0f} ms", "at most 50 ms",
                at_most(50)),
        ),
    ),
    Measurement(
        "gateway",
        "benchmarks gateway",
        "benchmarks gateway --quick",
        (
            Row("what the gateway adds to a request (engine simulated), median",
                lambda f: f["added_p50_ms"], "{:.2f} ms", "at most 2 ms", at_most(2)),
            Row("tokens through one gateway (engine simulated), 64 streams",
                lambda f: list(f["ours"].values())[-1]["tokens_per_s"], "{:,.0f} a second", "at least 15,000",
                at_least(15_000)),
            Row("requests a second beside a Serve ingress with Ray's defaults: whole answers over 1 / 32 connections, "
                "32 / 64 streams", _ratios("plain-default"), "{:.1f}x", "at least 5x", at_least(5)),
            Row("the same beside LiteLLM", _ratios("litellm"), "{:.1f}x", "at least 5x", at_least(5), "litellm"),
        ),
        (("litellm", "--litellm {litellm}"),),
    ),
    Measurement(
        "entries",
        "benchmarks entries --json",
        "benchmarks entries --json --requests 50 --rounds 1",
        (
            Row("keys, prices, limits and the ledger: of the time that a request takes of its gateway's thread",
                lambda f: f["loop_percent"], "{:.1f} %", "at most 3 %", at_most(3)),
            Row("an answer's end waits for its entry in the ledger, median",
                lambda f: f["end_ms"], "{:.2f} ms", "at most 1 ms", at_most(1)),
        ),
    ),
    Measurement(
        "fairness",
        "benchmarks fairness --size 80m --seconds 8 --rounds 3",
        "benchmarks fairness --seconds 1.5 --rounds 1 --itl-ms 50",
        (
            Row("a light tenant beside one with ten times as many requests under way, over its time alone",
                lambda f: f["light"]["ratio"], "{:.2f}x", "at most 1.5x", at_most(1.5)),
            Row("goodput at 4x the load the server sustains, over that at 1x",
                lambda f: f["goodput"]["share"], "{:.2f}", "at least 0.95", at_least(0.95)),
        ),
    ),
    Measurement(
        "interference",
        "benchmarks interference",
        "benchmarks interference --size tiny --streams 2 --prompt 64 --seconds 0.5 --rounds 1",
        (
            Row("two long prompts always under way: p90 between tokens of mixed workers over disaggregated ones",
                lambda f: f["over_disaggregated"]["itl_p90"]["mixed"], "{:.1f}x", "at least 3x", at_least(3)),
        ),
    ),
    Measurement(
        "turns",
        "benchmarks turns",
        "benchmarks turns --size tiny --context 512 --rounds 1",
        (
            Row("the next turn of a conversation of 4,096 tokens on another worker, over the prompt cold",
                lambda f: 100 * f["turn_over_cold"], "{:.0f} %", "at most 15 %", at_most(15)),
        ),
    ),
    Measurement(
        "engine-7m",
        "benchmarks engine {7m} --no-transformers --no-mixed",
        "benchmarks engine {7m} --no-transformers --no-mixed --batch 1,2,4 --rounds 1 --new 8",
        (
            Row("7M Llama in bfloat16 beside vLLM on CPU, batch 1 / 8 / 32", _engine("vllm"), "{:.1f}x",
                "at least 1.5x", at_least(1.5), "vllm"),
        ),
        (("vllm", "--vllm {vllm}"),),
    ),
    Measurement(
        "engine-0.5b",
        "benchmarks engine {0.5b} --no-transformers --no-mixed --rounds 2",
        "benchmarks engine {7m} --no-transformers --no-mixed --batch 1,2,4 --rounds 1 --new 4",
        (
            Row("the same at 0.5B, weights read in 12 bits without loss", _engine("vllm"), "{:.1f}x",
                "at least 2.5x / 2x / 1.8x", at_least(2.5, 2.0, 1.8), "vllm"),
        ),
        (("vllm", "--vllm {vllm}"),),
    ),
    Measurement(
        "speech",
        "benchmarks speech --rounds 3",
        "benchmarks speech --count 4 --rounds 1 --long 0",
        (
            Row("speech written down beside transformers' pipeline: one sound / a long one",
                lambda f: [f[name]["times_transformers"] for name in ("one by one", "long") if name in f],
                "{:.1f}x", "at least 1.5x", at_least(1.5)),
            Row("the same, all sounds at once", lambda f: f["together"]["times_transformers"], "{:.2f}x",
                "at least 1.5x", at_least(1.5)),
        ),
    ),
    Measurement(
        "encoder",
        "benchmarks encoder {minilm} --rounds 3",
        "benchmarks encoder {minilm} --sentences 8 --rounds 1",
        (
            Row("embeddings beside sentence-transformers, 1 to 256 tokens",
                lambda f: f["ratio_to_sentence_transformers"], "{:.1f}x", "at least 2x", at_least(2),
                "sentence-transformers"),
            Row("embeddings beside transformers, batches as they come",
                lambda f: f["ratio_to_transformers"], "{:.1f}x", "at least 4x", at_least(4)),
        ),
        (("sentence-transformers", "--sentence-transformers {sentence-transformers}"),),
    ),
    Measurement(
        "speculation",
        "benchmarks speculation --workloads prose,code,tools,edit --sides ngram+draft --batch 1,16 --tokens 192 "
        "--rounds 2 --threads 1",
        "benchmarks speculation --workloads prose,code,tools,edit --sides ngram+draft --batch 1 --tokens 12 --rounds 1",
        (
            Row("speculation where nobody foresees the text, over plain decoding, batch 1 / 16", _speculation("prose"),
                "{:.2f}x", "at least 0.98x", at_least(0.98)),
            Row("speculation on code", _speculation("code"), "{:.2f}x", "at least 1.4x", at_least(1.4)),
            Row("speculation on tool calls", _speculation("tools"), "{:.2f}x", "at least 1.1x", at_least(1.1)),
            Row("speculation on a file that is edited", _speculation("edit"), "{:.1f}x", "at least 1.5x",
                at_least(1.5)),
        ),
    ),
    Measurement(
        "structured",
        "benchmarks structured --parts throughput",
        "benchmarks structured --parts throughput --rounds 1 --new 17",
        (
            Row("what a JSON schema costs, batch 16", lambda f: f["throughput"]["cost_percent"], "{:.1f} %",
                "at most 5 %", at_most(5)),
        ),
    ),
    Measurement(
        "perplexity",
        "benchmarks perplexity {pico} --text {text}",
        "benchmarks perplexity {pico} --text {text} --tokens 600 --rounds 1",
        (
            Row("perplexity of pico-instruct with weights in 8 / 4 bits",
                lambda f: [f["variants"][kind]["perplexity_ratio"] for kind in ("int8", "int4")], "{:.2f}x",
                "at most 1.05x", at_most(1.05)),
        ),
    ),
    Measurement(
        "trace",
        "benchmarks trace {trace} --rates 6,8 --policies product,kv",
        "benchmarks trace {trace} --rates 6,8 --policies product,kv --limit 150",
        (
            Row("hits of an unlimited cache that the shared one gets, 8 workers, 6 / 8 times the trace's rate "
                "(simulated)",
                lambda f: [100 * value for value in _compared("hit_ratio_over_unlimited")(f)], "{:.1f} %",
                "at least 96 %", at_least(96), "trace"),
            Row("90th percentile of the time to first token, over a tuned KV-aware router's (simulated)",
                _compared("ttft_p90_over_kv_router"), "{:.2f}x", "at most 0.7x", at_most(0.7), "trace"),
            Row("90th percentile between tokens at 8 times the rate, mixed workers behind that router over ours "
                "(simulated)", _compared("itl_p90_kv_router_over_ours", "x8"), "{:.1f}x", "at least 5x", at_least(5),
                "trace"),
        ),
        (("trace", ""),),
    ),
    Measurement(
        "routing",
        "benchmarks routing --quick",
        "benchmarks routing --decisions 100 --keys 20000 --full 2000",
        (
            Row("decisions of one gateway a second on one core, 8 / 64 / 1,000 workers",
                lambda f: [row["decisions_per_s"] for row in f["rows"]], "{:,.0f}", "at least 1,000", at_least(1000)),
        ),
    ),
    Measurement(
        "answers",
        "training.evaluate --only instruct",
        "training.evaluate --only instruct --limit 3",
        (
            Row("questions about Python that pico-instruct answers right",
                lambda f: 100 * f["right"] / f["questions"], "{:.0f} %", "at least 95 %", at_least(95)),
        ),
    ),
)  # fmt: skip
