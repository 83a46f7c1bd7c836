"""``GET /v1/status``: every worker once, whatever it has in common with another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from serve_app.gateway.status import _workers
from serve_app.wire.replicas import AllCounters, Counters


async def test_processes_of_two_nodes_may_have_one_number():
    """As they have in two pods, where each counts from one."""

    def worker(stage: str, node: str, pid: int, **numbers: int) -> Counters:
        return Counters(stage, pid, {"node": node, **numbers})

    first = AllCounters((worker("decode", "a", 7, running=1), worker("prefill", "a", 9), worker("prefill", "b", 9)))
    second = AllCounters((worker("decode", "b", 7, running=2), worker("prefill", "a", 9), worker("prefill", "b", 9)))

    async def ask_all(*_: Any) -> list[AllCounters]:
        return [first, second]

    model: Any = SimpleNamespace(id="@cf/a/b")
    found = await _workers(SimpleNamespace(ask_all=ask_all), model)  # type: ignore[arg-type]
    assert [(w["stage"], w["node"], w.get("running")) for w in found["workers"]] == [
        ("decode", "a", 1), ("prefill", "a", None), ("prefill", "b", None), ("decode", "b", 2),
    ]  # fmt: skip
