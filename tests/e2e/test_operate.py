"""A model that an operator adds, starts, scales and stops while the server runs, with Serve's own replicas."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import CHAT
from tests.gateway.test_operate import RECORD
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
MINE = "@cf/me/mine"
BODY = {"query": "What does len do?", "contexts": [{"text": "It counts."}, {"text": "A fish."}]}


def test_added_started_scaled_and_stopped_by_hand(stack, http, run):
    def act(action: str, **more: object) -> dict:
        answer = http.post("/models/actions", json={"model": MINE, "action": action, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    def health() -> dict:
        return httpx.get(f"{stack.url}/health", timeout=60).json()["models"].get(MINE, {})

    def pids() -> set[int]:
        told = httpx.get(f"{stack.url}/v1/status", headers=stack.headers, timeout=60).json()
        return {worker["pid"] for worker in told["models"][MINE].get("workers", [])}

    assert http.post("/models/records", json={"record": RECORD}).status_code == 200
    try:
        act("start")
        wait_for(lambda: health().get("ready"), seconds=240)
        assert len(run(MINE, BODY)["response"]) == 2
        [first] = wait_for(pids)
        act("scale", replicas=2)
        both = wait_for(lambda: found if len(found := pids()) == 2 else None, seconds=240)
        # The worker that ran goes on.
        assert first in both
        act("scale", min_replicas=1, max_replicas=2)
        assert len(run(MINE, BODY)["response"]) == 2
        act("stop")
        assert http.post(f"/run/{MINE}", json=BODY).json()["errors"][0]["code"] == 5007
    finally:
        if MINE in httpx.get(f"{stack.url}/health", timeout=60).json()["models"]:
            act("stop")
        http.delete(f"/models/records/{MINE}")
    from ray import serve

    wait_for(lambda: "cf--me--mine" not in serve.status().applications, seconds=120)
    assert run(CHAT, {"prompt": "What does len do?", "max_tokens": 3})["response"]
