"""Counters of gateways and loads of workers in Prometheus' format, under the names that people's boards know.

Names of OpenTelemetry's conventions for generative AI (``gen_ai_``), of vLLM (``vllm:``) and our own (``serve_app_``).
Counters and histograms have a label ``gateway``: they begin at 0 with each gateway, and are added up by who reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from serve_app.gateway import stage_times
from serve_app.gateway.stage_times import Histogram
from serve_app.gateway.tally import Tally
from serve_app.state.kept.history import BORDERS, Numbers

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Our histogram -> what it is, OpenTelemetry's name, and vLLM's: of several today's first, then those of older boards.
_HISTOGRAMS = {
    "ttft": (
        "Time to first token",
        "gen_ai_server_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
    ),
    "itl": (
        "Mean time between the tokens of a request",
        "gen_ai_server_time_per_output_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "duration": (
        "Time from a request's arrival to its end",
        "gen_ai_server_request_duration_seconds",
        "vllm:e2e_request_latency_seconds",
    ),
}
# Those of :mod:`serve_app.gateway.stage_times`, under vLLM's names alone.
_STAGES = {
    "queue": ("vllm:request_queue_time_seconds", "Time until a worker was chosen"),
    "prefill": ("vllm:request_prefill_time_seconds", "Time from there to the first token"),
    "decode": ("vllm:request_decode_time_seconds", "Time from there to the end"),
    "inference": ("vllm:request_inference_time_seconds", "Time from when a worker was chosen to the end"),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request"),
    "generation_tokens": ("vllm:request_generation_tokens", "Tokens that were generated for a request"),
    "longest_choice": ("vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a request"),
}
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")


# As :meth:`serve_app.gateway.neighbours.counts.Counts.told` has it.
Neighbours = tuple[list[tuple[str, bool, float]], list[tuple[str, str, str, int]], list[tuple[str, str, int]]]


class Told(msgspec.Struct, array_like=True):
    """What one gateway of ``node`` has counted since its start. ``numbers``: by model; ``requests``: by model and
    status; ``refused``: by model and reason; ``sources``: prompt tokens by model and where their K/V came from;
    ``stages``, ``ends``: as in :class:`serve_app.gateway.stage_times.StageTimes`.
    """

    gateway: str
    node: str
    numbers: dict[str, list[int]]
    requests: list[tuple[str, str, int]]
    refused: list[tuple[str, str, int]]
    sources: list[tuple[str, str, int]]
    running: dict[str, int]
    waiting: dict[str, int]
    stages: dict[str, dict[str, Histogram]] = {}
    ends: list[tuple[str, str, int]] = []
    neighbours: Neighbours = ([], [], [])


_READ = msgspec.msgpack.Decoder(Told)


def told(tally: Tally, node: str, stats: Mapping[str, Mapping[str, Any]], running: Mapping[str, int]) -> bytes:
    """Of this gateway, for the one that is asked. ``stats``: of its dispatchers, by model."""

    def of(name: str) -> list[tuple[str, str, int]]:
        return [(model, key, n) for model, found in stats.items() for key, n in found[name].items()]

    waiting = {model: sum(found["waiting"].values()) for model, found in stats.items()}
    requests = [(*key, count) for key, count in tally.requests.items()]
    numbers = {model: list(n) for model, n in tally.since_start.items()}
    ends = [(*key, count) for key, count in tally.stages.ends.items()]
    return msgspec.msgpack.encode(
        Told(
            tally.gateway, node, numbers, requests, of("refused"), of("prompt_tokens_by_source"),
            dict(running), waiting, tally.stages.histograms, ends, tally.neighbours.told(),
        )
    )  # fmt: skip


def exposition(
    gateways: Iterable[bytes],
    node: str,
    workers: Mapping[str, Sequence[Mapping[str, Any]]],
    memory: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """The page. ``gateways``: what each has told, of which those of ``node`` count. ``workers``: loads by model.
    ``memory``: what nodes' brokers tell.
    """
    registry = CollectorRegistry(auto_describe=False)
    here = [found for found in map(_READ.decode, gateways) if found.node == node]
    own = [told for told in memory if told["node"] == node or not node]
    registry.register(_Once([*_of_gateways(here), *_of_workers(workers), *_of_memory(own)]))
    return generate_latest(registry)


def _of_memory(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Of the memory budget; nothing without one."""
    if not nodes:
        return
    budget = GaugeMetricFamily("serve_app_memory_budget_bytes", "What all workers of the node may hold together")
    reserved = GaugeMetricFamily("serve_app_memory_reserved_bytes", "What is kept for the workers that are up")
    moves = CounterMetricFamily(
        "serve_app_memory_moves", "Workers that were woken, sent to sleep, closed or lost", labels=["move"]
    )
    held = GaugeMetricFamily("serve_app_memory_held_bytes", "What workers hold", labels=["model", "stage"])
    waits = GaugeMetricFamily(
        "serve_app_memory_waiting_seconds", "For how long a model waits for room", labels=["model"]
    )
    for node in nodes:
        budget.add_metric([], node["budget_bytes"])
        reserved.add_metric([], node["reserved_bytes"])
        for move in ("wakes", "sleeps", "closes", "losses"):
            moves.add_metric([move], node[move])
        sums: dict[tuple[str, str], int] = {}
        waited: dict[str, float] = {}
        for worker in node["workers"]:
            key, model = (worker["model"], worker["stage"]), worker["model"]
            sums[key] = sums.get(key, 0) + worker["held_bytes"]
            waited[model] = max(waited.get(model, 0.0), worker["waited_s"] or 0.0)
        for each, size in sums.items():
            held.add_metric(each, size)
        for model, seconds in waited.items():
            waits.add_metric([model], seconds)
    yield from (budget, reserved, moves, held, waits)


class _Once:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _of_gateways(gateways: list[Told]) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "serve_app_requests", "Requests that have ended, by how", labels=["model", "status", "gateway"]
    )
    refused = CounterMetricFamily("serve_app_requests_refused", "Requests refused with 429, by reason",
                                  labels=["model", "reason", "gateway"])  # fmt: skip
    sources = CounterMetricFamily("serve_app_prompt_tokens", "Prompt tokens by where their K/V came from",
                                  labels=["model", "source", "gateway"])  # fmt: skip
    success = CounterMetricFamily("vllm:request_success", "Requests that ended, by how",
                                  labels=["model_name", "finished_reason", "gateway"])  # fmt: skip
    for one in gateways:
        for model, status, count in one.requests:
            ended.add_metric([model, status, one.gateway], count)
        for model, reason, count in one.ends:
            success.add_metric([model, reason, one.gateway], count)
        for model, reason, count in one.refused:
            refused.add_metric([model, reason, one.gateway], count)
        for model, source, count in one.sources:
            sources.add_metric([model, source, one.gateway], count)
    yield from (ended, refused, sources, success)
    yield from _tokens(gateways)
    for name, (about, otel, *vllms) in _HISTOGRAMS.items():
        families = [HistogramMetricFamily(otel, about, labels=["gen_ai_request_model", "gateway"])]
        families += [HistogramMetricFamily(vllm, about, labels=["model_name", "gateway"]) for vllm in vllms]
        for one in gateways:
            for model, given in one.numbers.items():
                numbers = Numbers(given)
                buckets = _cumulated(BORDERS[name], numbers.buckets(name))
                for family in families:
                    family.add_metric([model, one.gateway], buckets, numbers.sum_s(name))
        yield from families
    for name, (vllm, about) in _STAGES.items():
        family = HistogramMetricFamily(vllm, about, labels=["model_name", "gateway"])
        for one in gateways:
            for model, found in one.stages.items():
                if name in found:
                    buckets = _cumulated(stage_times.BORDERS[name], found[name].counts)
                    family.add_metric([model, one.gateway], buckets, found[name].sum)
        yield family
    yield from _of_neighbours(gateways)
    for label, name in (("running", "vllm:num_requests_running"), ("waiting", "vllm:num_requests_waiting")):
        gauge = GaugeMetricFamily(name, f"Requests that are {label}", labels=["model_name"])
        for model in sorted({model for one in gateways for model in one.waiting}):
            waiting = sum(one.waiting.get(model, 0) for one in gateways)
            under_way = sum(one.running.get(model, 0) for one in gateways)
            gauge.add_metric([model], waiting if label == "waiting" else max(0, under_way - waiting))
        yield gauge


def _of_neighbours(gateways: list[Told]) -> Iterator[Metric]:
    """Of other clusters, where any are listed or have asked."""
    if not any(any(one.neighbours) for one in gateways):
        return
    names = ["neighbour", "gateway"]
    up = GaugeMetricFamily("serve_app_neighbour_up", "Whether another cluster answers", labels=names)
    latency = GaugeMetricFamily("serve_app_neighbour_latency_seconds", "A round trip to it", labels=names)
    passed = CounterMetricFamily("serve_app_requests_passed", "Requests passed to another cluster, by how that went",
                                 labels=["neighbour", "model", "how", "gateway"])  # fmt: skip
    received = CounterMetricFamily("serve_app_requests_received", "Requests that other clusters have passed here",
                                   labels=["account", "model", "gateway"])  # fmt: skip
    for one in gateways:
        seen, given, taken = one.neighbours
        for name, reachable, seconds in seen:
            up.add_metric([name, one.gateway], float(reachable))
            latency.add_metric([name, one.gateway], seconds)
        for *labels, count in given:
            passed.add_metric([*labels, one.gateway], count)
        for account, model, count in taken:
            received.add_metric([account, model, one.gateway], count)
    yield from (up, latency, passed, received)


def _tokens(gateways: list[Told]) -> Iterator[Metric]:
    for name, field, about in (
        ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of requests that have ended"),
        ("vllm:generation_tokens", "completion_tokens", "Tokens generated"),
        ("vllm:prefix_cache_queries", "prompt_tokens", "Prompt tokens that were looked for in caches"),
        ("vllm:prefix_cache_hits", "cached_tokens", "Prompt tokens that were found in caches"),
        ("serve_app_neurons", "neurons", "Neurons charged"),
        ("serve_app_cost", "money", "Charged, in the price list's currency"),
    ):
        family = CounterMetricFamily(name, about, labels=["model_name" if ":" in name else "model", "gateway"])
        scale = {"neurons": 1e6, "money": 1e9}.get(field, 1)
        for one in gateways:
            for model, given in one.numbers.items():
                family.add_metric([model, one.gateway], Numbers(given).of(field) / scale)
        yield family


def _of_workers(workers: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Metric]:
    names = ["model", "worker", "stage", "role"]
    queued = GaugeMetricFamily("serve_app_worker_queued_tokens", "Prompt tokens a worker has to compute", labels=names)
    running = GaugeMetricFamily("serve_app_worker_running", "Requests in a worker's batch", labels=names)
    step = GaugeMetricFamily("serve_app_worker_step_seconds", "Mean time of a worker's last steps", labels=names)
    use = GaugeMetricFamily("serve_app_worker_kv_use", "Share of a worker's KV cache in use", labels=names)
    about = "Share of a worker's KV cache in use, 1 is all of it"
    uses = [GaugeMetricFamily(name, about, labels=["model_name", "engine"]) for name in _KV_USE]
    for model, loads in workers.items():
        for load in loads:
            labels = [model, load["replica"], load["stage"], load["role"]]
            queued.add_metric(labels, load["queued_tokens"])
            running.add_metric(labels, load["running"])
            step.add_metric(labels, load["step_ms"] / 1e3)
            use.add_metric(labels, load["kv_use"])
            for family in uses:
                family.add_metric([model, load["replica"]], load["kv_use"])
    yield from (queued, running, step, use, *uses)


def _cumulated(borders: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """``counts``: of each bucket alone, one more than there are ``borders``."""
    names = [*map(repr, borders), "+Inf"]
    return [(name, float(sofar)) for name, sofar in zip(names, accumulate(counts), strict=True)]
