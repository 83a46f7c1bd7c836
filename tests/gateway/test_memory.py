"""What a gateway shows of the memory budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from serve_app.gateway import prometheus
from serve_app.gateway.memory import MemoryWatch
from tests.waiting import until

WORKER = {"model": "m", "stage": "decode", "state": "up", "pinned": False, "needs_bytes": 60, "held_bytes": 50,
          "gpu": 0.0, "busy": False, "idle_s": 1.0, "waited_s": None, "why": ""}  # fmt: skip
WAITS = WORKER | {"model": "w", "state": "waiting", "held_bytes": 0, "waited_s": 3.0, "why": "w waits for room: m"}
NODE = {"node": "n", "budget_bytes": 100, "held_bytes": 50, "reserved_bytes": 60, "wakes": 4, "sleeps": 3, "closes": 1,
        "losses": 0,
        "workers": [WORKER, WORKER | {"stage": "prefill", "state": "asleep", "held_bytes": 0}, WAITS]}  # fmt: skip


def model(name: str):
    return SimpleNamespace(id=name, record=None, profile=SimpleNamespace(stages={}), source=Path(), home=Path())


async def test_what_brokers_tell_is_shown_by_model_and_to_who_waits() -> None:
    watch = MemoryWatch([model("m"), model("w")])
    assert watch.total() == {} and watch.of("m") == {} and watch.waiting("m", lambda: "starts") == "starts"
    answers = [[NODE], RuntimeError("is being started"), [NODE | {"held_bytes": 70}]]

    async def ask():
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch.ask, watch.budget = ask, 100
    watch.start()
    await until(lambda: watch.nodes)
    assert watch.total() == {"budget_bytes": 100, "held_bytes": 50, "reserved_bytes": 60}
    assert watch.of("m") == {"state": "up", "held_bytes": 50, "needs_bytes": 120}
    assert watch.of("w")["why"] == "w waits for room: m" and watch.of("w")["waited_s"] == 3.0
    assert watch.waiting("w", lambda: "starts") == "w waits for room: m"
    assert watch.waiting("m", lambda: "starts") == "starts"
    watch.unfit = {"x": "too large"}
    assert watch.of("x") == {"state": "never", "why": "too large"}
    watch.close()


def test_metrics_have_it() -> None:
    page = prometheus.exposition([], "n", {}, [NODE, NODE | {"node": "another", "budget_bytes": 7}]).decode()
    for line in (
        "serve_app_memory_budget_bytes 100.0",
        "serve_app_memory_reserved_bytes 60.0",
        'serve_app_memory_held_bytes{model="m",stage="decode"} 50.0',
        'serve_app_memory_waiting_seconds{model="w"} 3.0',
        'serve_app_memory_moves_total{move="closes"} 1.0',
    ):
        assert line in page.splitlines()
    assert "memory" not in prometheus.exposition([], "n", {}).decode()
