"""What the running server tells of itself: live, by request, of the cluster, and to Prometheus; and its sign-in."""

from __future__ import annotations

import httpx

from tests.e2e.conftest import CHAT
from tests.waiting import wait_for


def test_what_was_done_is_told_everywhere(stack):
    asked = {"model": CHAT, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    with httpx.Client(base_url=stack.url, headers=stack.headers, timeout=120) as http:
        answer = http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200
        own = answer.headers["cf-ray"]

        def live():
            told = http.get("/v1/metrics/now").json()
            return told if any(each["model"] == CHAT and each["ttft"]["p50"] for each in told["by_model"]) else None

        assert wait_for(live)["gateways"] == 1
        listed = wait_for(
            lambda: [r for r in http.get(f"/v1/requests?model={CHAT}").json()["result"] if r["id"] == own]
        )
        assert listed[0]["status"] == "done" and 0 < listed[0]["ttft_ms"] <= listed[0]["total_ms"]
        page = wait_for(lambda: p.text if "kv_cache_usage_perc{" in (p := http.get("/metrics")).text else "")
        assert "serve_app_requests_total{gateway=" in page and f'model="{CHAT}",status="done"' in page
        assert 'finished_reason="length",gateway=' in page and "vllm:request_queue_time_seconds_count{" in page
        cluster = http.get("/v1/cluster").json()
        assert {w["model"] for node in cluster["nodes"] for w in node["workers"]} >= {CHAT} and cluster["scaling"]


def test_one_signs_in_through_haproxy(stack):
    with httpx.Client(base_url=stack.url, timeout=120) as http:
        page = http.get("/dashboard")
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
        told = http.post("/dashboard/session", json={"key": stack.key}).json()
        assert http.get("/v1/models").status_code == 403
        assert http.get("/v1/models", headers={"x-csrf-token": told["csrf"]}).status_code == 200
