"""The gateway's benchmark on the session's Serve, and beside sides that answer wrongly."""

from __future__ import annotations

import inspect
import re

import httpx
import pytest

from benchmarks import checks
from benchmarks.gateway import channel, gateway
from benchmarks.gateway.simulated import MODEL, SimulatedDecode, write_record
from deployments.stage import EngineStage
from serve_app.config import api_key, load_settings

PREFIX = "/benchmark"


@pytest.fixture(scope="module")
def served(stack, tmp_path_factory):
    """(port, key) of a gateway with a simulated engine, and of the plain ingress, on the session's Serve."""
    from ray import serve

    home = tmp_path_factory.mktemp("benchmark")
    write_record(home)
    settings = load_settings({"SERVE_APP_HOME": str(home), "SERVE_APP_MODELS": MODEL})
    targets = gateway.run_targets(settings, name="benchmark", prefix=PREFIX)
    serve.run_many(targets)
    yield int(stack.url.rpartition(":")[2]), api_key(settings)
    for target in targets:
        serve.delete(target.name, _blocking=False)


def test_figures_come_from_right_answers_only(served, liar, capsys):
    port, key = served
    ours = gateway.Target(port, PREFIX + gateway.ROUTE, key, ours=True)
    targets = {"ours": ours, "plain": gateway.Target(port, f"{PREFIX}/plain{gateway.ROUTE}", key)}
    gateway.wait_ready(targets, {})
    noop = gateway.Target(port, f"{PREFIX}/plain/noop", key)
    results = gateway.compare(targets, gateway.QUICK, 1, noop)
    assert results["answers_checked"] == 2 * sum(case.requests for case in gateway.QUICK.values()) + 20
    gateway.report(results)
    assert re.search(r"ours / plain: unary_c1 \d+\.\dx, streams_c8 \d+\.\dx", capsys.readouterr().out)

    status = httpx.get(
        f"http://127.0.0.1:{port}{PREFIX}/v1/status", headers={"Authorization": f"Bearer {key}"}, timeout=120
    )
    assert status.status_code == 200, status.text
    [worker] = status.json()["models"][MODEL]["routing"]["workers"]
    assert worker["stage"] == "decode"  # the gateway hears of its load, and requests are sent where routing says

    wrong = liar(200, b'{"choices": [{"message": {"content": "something else"}}]}')
    targets["wrong"] = gateway.Target(wrong.port, gateway.ROUTE)
    with pytest.raises(SystemExit, match=r"no figures: (?s:.)*wrong, unary_c1: the text is 'something else'"):
        gateway.compare(targets, gateway.QUICK, 1, noop)
    assert "x" not in capsys.readouterr().out


def test_a_gateway_that_refuses_everything_is_no_fast_one(liar, monkeypatch):
    monkeypatch.setattr(gateway, "READY_S", 0.1)
    busy = liar(503, b'{"errors": [{"message": "loading"}]}')
    with pytest.raises(SystemExit, match="ours does not get ready: status 503"):
        gateway.wait_ready({"ours": gateway.Target(busy.port, gateway.ROUTE, ours=True)}, {})


def test_the_simulated_engine_answers_what_a_decode_stage_does():
    """A call that gateways begin to make must be answered here as well."""
    asked = {
        name
        for name, method in inspect.getmembers(EngineStage, inspect.iscoroutinefunction)
        if not name.startswith("_") and list(inspect.signature(method).parameters)[1:2] == ["call"]
    }
    assert {"generate", "probe", "subscribe"} <= asked
    # Decode asks prefill itself, and no benchmark of the gateway asks for decisions.
    assert asked - {"prefill", "decide"} <= set(dir(SimulatedDecode))


def test_channel(capsys, monkeypatch):
    assert channel.main(["--streams", "4", "--steps", "20", "--interval-ms", "0"]) == 0
    assert "tokens_per_s" in capsys.readouterr().out
    monkeypatch.setattr(checks.Checks, "equal", lambda self, *_: self.add("a stream", "lost"))
    with pytest.raises(SystemExit, match="no figures"):
        channel.main(["--streams", "1", "--steps", "2", "--interval-ms", "0"])
    assert capsys.readouterr().out == ""
