"""`serve-app top` and `status`: from what the route answers to what people and programs read."""

from __future__ import annotations

import json

import pytest

from serve_app.cli.status import described
from serve_app.cli.top import tables
from serve_app.client.view import look
from tests.cli.conftest import connected


def status(generated: int = 0, *, pid: int = 7) -> dict:
    load = {"replica": "r1", "stage": "decode", "role": "mixed", "queued_tokens": 12, "running": 3, "waiting": 1}
    load |= {"batch": 0, "kv_use": 0.25, "step_ms": 9.5, "age_s": 0.1}
    worker = {"stage": "decode", "pid": pid, "generated_tokens": generated, "prompt_tokens": 40, "running": 3}
    draft = {"stage": "draft", "pid": 8, "running": 1, "used_blocks": 1, "total_blocks": 4}
    routing = {"waiting": {"ann": 2, "bob": 0}, "workers": [load]}
    model = {"ready": True, "inflight": 4, "routing": routing, "workers": [worker, draft], "silent": ["prefill"]}
    return {"models": {"@cf/a/b": model, "@cf/c/d": {"ready": False, "inflight": 0}}, "gateway": {}}


def test_rates_are_differences_of_counters():
    [model, other] = look(status(300), status(100), 2.0).models
    assert model.tokens_per_s == 100.0 and model.prompt_tokens_per_s == 0.0 and model.cached_per_s is None
    assert look(status(300)).models[0].tokens_per_s is None
    # Another process counts from nothing.
    assert look(status(30, pid=9), status(100), 1.0).models[0].tokens_per_s == 30.0
    # So does one with the same number on another node.
    now, before = status(30), status(100)
    now["models"]["@cf/a/b"]["workers"][0]["node"], before["models"]["@cf/a/b"]["workers"][0]["node"] = "b", "a"
    assert look(now, before, 1.0).models[0].tokens_per_s == 30.0
    assert model.waiting == {"ann": 2} and (other.ready, other.workers) == (False, [])
    assert [(each.stage, each.role, each.kv_use) for each in model.workers] == [
        ("decode", "mixed", 0.25),
        ("draft", "draft", 0.25),
    ]


def test_people_read_lines():
    said = described(look(status()), "http://here")
    assert "1 of 2 models ready" in said and "@cf/c/d  not ready" in said and "prefill: a worker is silent" in said
    assert "ann: 2 waiting" in said and "as mixed" in said and "KV 25%" in said


def test_a_memory_budget_is_read_as_well():
    worker = {"model": "@cf/a/b", "stage": "decode", "state": "waiting", "held_bytes": 0, "why": "it waits for room"}
    node = {"budget_bytes": 2 << 30, "held_bytes": 1 << 30, "reserved_bytes": 3 << 29, "workers": [worker]}
    said = described(look({**status(), "memory": [node]}), "http://here")
    assert "1,024 MiB held, 1,536 MiB reserved of 2,048 MiB" in said
    assert "@cf/a/b decode  waiting, 0 MiB  (it waits for room)" in said


def test_the_terminal_gets_tables_in_which_nothing_is_markup():
    from rich.console import Console

    told = status(300)
    told["models"]["[red]@x"] = told["models"].pop("@cf/a/b")
    console = Console(width=160, record=True)
    console.print(*tables(look(told, None)))
    shown = console.export_text()
    assert "[red]@x" in shown and "25%" in shown and "ann 2" in shown


@pytest.mark.parametrize("once", [("--once",), ("--once", "--json")])
async def test_the_running_server_once(echo, shell, once):
    out, _ = await shell("top", *once, "--every", "0.1")
    if "--json" in once:
        [model] = json.loads(out)["models"]
        assert (model["id"], model["ready"]) == (echo.model, True)
    else:
        assert "\x1b" not in out and f"{echo.model}  ready" in out
    out, _ = await shell("status")
    assert f"{echo.model}  ready" in out
    out, _ = await shell("status", "--json")
    assert json.loads(out)["models"][echo.model]["ready"]


async def test_a_model_that_is_not_ready_makes_the_status_1(echo, shell, monkeypatch):
    connected(echo, monkeypatch)
    for model in echo.gateway.models:
        model.ready = False
    out, _ = await shell("status", status=1)
    assert "not ready" in out
