"""/metrics and ops/, as real Prometheus reads them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
import uvicorn
import yaml
from prometheus_client.parser import text_string_to_metric_families

from serve_app.gateway import prometheus
from serve_app.gateway.http.app import build_http
from serve_app.gateway.tally import Tally
from serve_app.state.kept.history import BORDERS, HOUR_S
from tests.dashboard.test_session import a_key
from tests.gateway.conftest import served  # noqa: F401
from tests.gateway.http.test_accounts import KEY
from tests.gateway.test_history import settled
from tests.waiting import until

OPS = Path(__file__).resolve().parents[2] / "ops"
ONE_DATABASE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
STATS = {
    "m": {
        "refused": {"deadline": 2},
        "prompt_tokens_by_source": {"own": 5, "computed": 15},
        "waiting": {"a": 1, "b": 2},
        "workers": [
            {"replica": "r1", "node": "n1", "stage": "decode", "role": "mixed", "queued_tokens": 7, "running": 3,
             "waiting": 0, "kv_use": 0.25, "step_ms": 4.0}
        ],
    }
}  # fmt: skip
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")


def counted(name: str, requests: int, node: str = "n1") -> bytes:
    tally = Tally(name)
    for number in range(requests):
        tally(settled("a", ttft_s=0.01 * number, itl_s=0.02, queue_s=0.0, cut=number == 0))
    tally(settled("b", status="failed", tokens=0))
    tally(settled("b", status="left", tokens=0))
    tally.tick(0.0, HOUR_S, [])
    return prometheus.told(tally, node, STATS, {"m": 5})


def page() -> str:
    told = [counted("g1", 3), counted("g2", 4), counted("elsewhere", 100, "n2")]
    return prometheus.exposition(told, "n1", {m: s["workers"] for m, s in STATS.items()}).decode()


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_gateways_of_the_node_add_up():
    found = samples(page())

    def total(name: str, **labels: str) -> float:
        return sum(v for given, v in found[name] if labels.items() <= given.items())

    assert total("serve_app_requests_total", status="done") == 7
    ends = {end: total("vllm:request_success_total", finished_reason=end) for end in ("stop", "length", "abort")}
    assert ends == {"stop": 5, "length": 2, "abort": 2}
    assert total("serve_app_requests_total", status="failed") == 2
    assert total("vllm:generation_tokens_total") == 70 and total("vllm:prompt_tokens_total") == 220
    assert total("vllm:prefix_cache_hits_total") / total("vllm:prefix_cache_queries_total") == 0.25
    for name in ("gen_ai_server_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
        assert total(f"{name}_count") == total(f"{name}_bucket", le="+Inf") == 7
        borders = {float(labels["le"]) for labels, _ in found[f"{name}_bucket"]}
        assert borders == {*BORDERS["ttft"], float("inf")}
        assert total(f"{name}_bucket", le="0.02") == 6 and total(f"{name}_sum") == pytest.approx(0.09)
    assert total("vllm:num_requests_waiting") == 6 and total("vllm:num_requests_running") == 4
    assert found["vllm:kv_cache_usage_perc"] == [({"model_name": "m", "engine": "r1"}, 0.25)]
    # What a request took adds up: it waited, was prefilled, and decoded until its end after a second.
    parts = [f"vllm:request_{part}_time_seconds" for part in ("queue", "prefill", "decode")]
    assert [total(f"{part}_count") for part in parts] == [7, 7, 7]
    assert sum(total(f"{part}_sum") for part in parts) == pytest.approx(7.0)
    assert total("vllm:request_prefill_time_seconds_bucket", le="0.01") == 4
    assert total("vllm:request_prompt_tokens_sum") == 7 * 20 and total("vllm:request_generation_tokens_sum") == 70
    assert total("vllm:request_generation_tokens_bucket", le="5.0") == 0
    assert total("vllm:request_generation_tokens_bucket", le="10.0") == 7


def test_the_board_that_vllm_ships_finds_all_that_it_asks_for():
    """examples/online_serving/prometheus_grafana/grafana.json there, as it was in 2026; and what its newer ones ask."""
    histograms = {
        "e2e_request_latency_seconds",
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
    }
    asked = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    asked |= {"prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting"}
    asked |= {"gpu_cache_usage_perc", "kv_cache_usage_perc", "request_success_total"}
    found = samples(page())
    assert {f"vllm:{name}" for name in asked} <= set(found)
    # It asks of one model, by this label.
    assert all(labels["model_name"] == "m" for name in asked for labels, _ in found[f"vllm:{name}"])


def test_board_and_alerts_ask_for_what_there_is():
    board = json.loads((OPS / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    [group] = yaml.safe_load((OPS / "alerts.yml").read_text())["groups"]
    asked += [rule["expr"] for rule in group["rules"]]
    named = {name for expr in asked for name in re.findall(r"\b(?:vllm:|gen_ai_server_|serve_app_)\w+", expr)}
    assert len(named) > 12 and named <= set(samples(page()))


@needs_promtool
def test_promtool_finds_nothing_wrong(tmp_path):
    checked = subprocess.run(["promtool", "check", "metrics"], input=page(), text=True, capture_output=True)
    # Colons are vLLM's, and against promtool's taste.
    wrong = [line for line in checked.stderr.splitlines() if "vllm:" not in line]
    assert wrong == [] and checked.returncode in (0, 3), checked.stderr
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(OPS / name, tmp_path)
    (tmp_path / "serve-app.key").write_text("a key")
    checked = subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@ONE_DATABASE
async def test_metrics_are_the_operators_and_open_on_loopback_where_that_is_set(served):  # noqa: F811
    gateway = served.gateways[0]
    gateway.tally(settled())
    gateway.tally.tick(0.0, HOUR_S, [])
    answer = await served.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert samples(answer.text)["serve_app_requests_total"][0][1] == 1
    _, team = await a_key(served, ["read"], "team-a")
    _, runs = await a_key(served, ["inference"])
    assert [(await served.call("GET", "/metrics", key)).status_code for key in (team, runs)] == [403, 403]
    transport = httpx.ASGITransport(build_http(gateway), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport) as http:

        async def status(host: str = "127.0.0.1:8000", **headers: str) -> int:
            return (await http.get(f"http://{host}/metrics", headers=headers)).status_code

        assert await status() == 401
        gateway.settings.metrics_open = True
        assert [await status(), await status("localhost:8000"), await status("[::1]:8000")] == [200] * 3
        # Not for others, nor through a proxy, nor by a name that somebody made lead here.
        assert await status("evil.example") == await status("10.0.0.1") == 401
        assert await status(**{"x-serve-app-client": "10.0.0.1"}) == await status(**{"x-forwarded-for": "::1"}) == 401
        assert (await http.get("http://127.0.0.1/v1/status")).status_code == 401
    transport = httpx.ASGITransport(build_http(gateway), client=("10.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport) as http:
        lie = {"x-serve-app-client": "127.0.0.1"}
        assert (await http.get("http://127.0.0.1/metrics", headers=lie)).status_code == 401


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
@ONE_DATABASE
async def test_prometheus_scrapes_with_the_shipped_configuration(served, tmp_path):  # noqa: F811
    gateway = served.gateways[0]
    gateway.tally(settled(ttft_s=0.2))
    gateway.tally.tick(0.0, HOUR_S, [])
    api, port = _port(), _port()
    config = (OPS / "prometheus.yml").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{api}").replace("15s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    (tmp_path / "serve-app.key").write_text(KEY)
    shutil.copy(OPS / "alerts.yml", tmp_path)
    server = uvicorn.Server(uvicorn.Config(build_http(gateway), port=api, log_level="error", lifespan="off"))
    serving = asyncio.ensure_future(server.serve())
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    running = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1") as http:

            async def scraped() -> bool:
                try:
                    found = await http.get("/query", params={"query": "sum(serve_app_requests_total)"})
                except httpx.TransportError:
                    return False
                return found.status_code == 200 and found.json()["data"]["result"] != []

            await until(scraped)
            [target] = (await http.get("/targets")).json()["data"]["activeTargets"]
            assert target["health"] == "up" and target["lastError"] == ""
            [rules] = (await http.get("/rules")).json()["data"]["groups"]
            assert len(rules["rules"]) >= 6 and {rule.get("lastError", "") for rule in rules["rules"]} == {""}
    finally:
        running.terminate()
        running.wait()
        server.should_exit = True
        await serving
