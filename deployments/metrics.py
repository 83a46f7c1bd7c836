"""What a gateway knows of queues, choices, caches and workers, as metrics on the node's metrics port.

Counted by the dispatchers in plain numbers; here they are published every few seconds, so that a request pays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve import metrics

from serve_app.gateway.tally import Tally

PERIOD_S = 5.0
# Accounts that have a queue of their own in the metrics; what more there are share one name.
MAX_ACCOUNTS = 200


class GatewayMetrics:
    """``read()`` gives the dispatchers' statistics by model, see
    :meth:`serve_app.gateway.dispatch.dispatcher.Dispatcher.stats`. ``tally`` counts the work of all tasks.
    """

    def __init__(self, read: Callable[[], dict[str, dict[str, Any]]], tally: Tally) -> None:
        self._read = read
        self._tally = tally
        self._before: dict[tuple[str, ...], float] = {}
        self._accounts: set[str] = set()
        self._shown: set[tuple[str, str, str]] = set()
        counter, gauge = metrics.Counter, metrics.Gauge
        self._requests = counter("serve_app_requests", "Requests that have ended, by how", ("model", "status"))
        self._tokens = counter("serve_app_tokens", "Tokens of requests that have ended", ("model", "kind"))
        self._placed = counter("serve_app_requests_placed", "Requests sent to a worker, by reason", ("model", "why"))
        self._refused = counter("serve_app_requests_refused", "Requests refused with 429", ("model", "reason"))
        self._prompt = counter("serve_app_prompt_tokens", "Prompt tokens by where they came from", ("model", "source"))
        said = "Cached prompt tokens: expected at arrival, expected and missing, unexpected"
        self._cached = counter("serve_app_estimated_cached_tokens", said, ("model", "kind"))
        self._output = counter("serve_app_output_tokens", "Tokens generated", ("model",))
        self._waiting = gauge("serve_app_requests_waiting", "Requests that wait in this gateway", ("model", "account"))
        self._in_flight = gauge("serve_app_tokens_in_flight", "Tokens admitted and not done", ("model", "stage"))
        names = ("model", "worker", "stage")
        self._queued = gauge("serve_app_worker_queued_tokens", "Prompt tokens a worker has still to compute", names)
        self._running = gauge("serve_app_worker_running", "Requests in a worker's batch", names)
        self._kv = gauge("serve_app_worker_kv_use", "Share of a worker's KV cache in use", names)
        self._role = gauge("serve_app_worker_role", "1 for the role a worker prefers now", (*names, "role"))

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._publish_always())

    async def _publish_always(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.publish()

    def publish(self) -> None:
        for (model, status), count in self._tally.requests.items():
            self._add(self._requests, count, {"model": model, "status": status})
        for (model, kind), count in self._tally.tokens.items():
            self._add(self._tokens, count, {"model": model, "kind": kind})
        for model, stats in self._read().items():
            tags = {"model": model}
            for why, count in stats["why"].items():
                self._add(self._placed, count, {**tags, "why": why})
            for reason, count in stats["refused"].items():
                self._add(self._refused, count, {**tags, "reason": reason})
            for source, count in stats["prompt_tokens_by_source"].items():
                self._add(self._prompt, count, {**tags, "source": source})
            for kind, count in stats["cached_tokens"].items():
                self._add(self._cached, count, {**tags, "kind": kind})
            self._add(self._output, stats["output_tokens"], tags)
            self._queues(model, stats["waiting"])
            self._in_flight.set(stats["prefill_tokens_in_flight"], {**tags, "stage": "prefill"})
            self._in_flight.set(stats["decode_tokens_in_flight"], {**tags, "stage": "decode"})
            self._workers(model, stats["workers"])

    def _queues(self, model: str, waiting: dict[str, int]) -> None:
        shown = dict.fromkeys(self._accounts, 0)
        for account, count in waiting.items():
            name = account if account in self._accounts or len(self._accounts) < MAX_ACCOUNTS else "(others)"
            self._accounts.add(name)
            shown[name] = shown.get(name, 0) + count
        for account, count in shown.items():
            self._waiting.set(count, {"model": model, "account": account})

    def _workers(self, model: str, workers: list[dict[str, Any]]) -> None:
        now = set()
        for worker in workers:
            name = (model, worker["replica"], worker["stage"])
            tags = dict(zip(("model", "worker", "stage"), name, strict=True))
            now.add(name)
            self._queued.set(worker["queued_tokens"], tags)
            self._running.set(worker["running"], tags)
            self._kv.set(worker["kv_use"], tags)
            for role in ("prefill", "decode", "mixed"):
                self._role.set(float(role == worker["role"]), {**tags, "role": role})
        for name in {n for n in self._shown if n[0] == model} - now:
            tags = dict(zip(("model", "worker", "stage"), name, strict=True))
            for series in (self._queued, self._running, self._kv):
                series.set(0, tags)
            for role in ("prefill", "decode", "mixed"):
                self._role.set(0.0, {**tags, "role": role})
        self._shown = {n for n in self._shown if n[0] != model} | now

    def _add(self, series: Any, total: float, tags: dict[str, str]) -> None:
        key = (series.info["name"], *tags.values())
        if (more := total - self._before.get(key, 0.0)) > 0:
            series.inc(more, tags)
            self._before[key] = total
