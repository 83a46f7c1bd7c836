"""Batches of models without replicas: one wakes its own model alone, and holds it awake no longer than it has work."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from ray import serve

from serve_app.tasks.model import application_name
from tests.e2e.conftest import CHAT
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
WRITES, TELLS = "@cf/me/sleeps-and-writes", "@cf/me/sleeps-and-tells"
NONE = "min_replicas: 0, max_replicas: 1, upscale_delay_s: 0, downscale_delay_s: 2, num_cpus: 0.125, cpu_threads: 1"
RECORD = """\
id: "{}"
task: {}
description: Without replicas until somebody asks.
created_at: "2026-11-01"
weights: {{path: checkpoints/{}}}
price: {{neurons: {{input: 1.0}}}}
dtype: float32
serving: {{local: {{{}}}}}
"""
RECORDS = {
    WRITES: RECORD.format(WRITES, "text-generation", "pico-instruct", f"decode: {{{NONE}, kv_cache_bytes: 64MiB}}"),
    TELLS: RECORD.format(TELLS, "text-classification", "pico-sentiment", f"predictor: {{{NONE}}}"),
}
ASKED = {
    WRITES: [{"prompt": f"Count to {n}.", "max_tokens": 4, "temperature": 0} for n in range(20)],
    TELLS: [{"text": text} for text in ("What a wonderful evening!", "The soup was cold and bland.")],
}


def replicas(model: str) -> int:
    deployments = serve.status().applications[application_name(model)].deployments
    return sum(sum(found.replica_states.values()) for found in deployments.values())


def said(result: Any) -> Any:
    """A text, or labels; two texts that are computed together have scores that differ in the last digit."""
    return result["response"] if isinstance(result, dict) else [one["label"] for one in result]


@pytest.fixture
def sleepers(stack, http):
    def act(model: str, action: str) -> httpx.Response:
        return http.post("/models/actions", json={"model": model, "action": action})

    for model, record in RECORDS.items():
        assert (answer := http.post("/models/records", json={"record": record})).status_code == 200, answer.text
        assert act(model, "start").status_code == 200
    names = {application_name(model) for model in RECORDS}
    wait_for(lambda: all(serve.status().applications.get(name) for name in names), 120)
    wait_for(lambda: all(serve.status().applications[name].status == "RUNNING" for name in names), 240)
    yield
    for model in RECORDS:
        act(model, "stop")
        http.delete(f"/models/records/{model}")
    wait_for(lambda: not names & set(serve.status().applications), 120)


def test_a_batch_wakes_its_model_and_no_other_and_lets_it_sleep_again(sleepers, http):
    def submit(model: str, requests: list[dict]) -> str:
        answer = http.post(f"/run/{model}", params={"queueRequest": "true"}, json={"requests": requests})
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]["request_id"]

    def answers(model: str, request_id: str) -> list[dict]:
        result = http.post(f"/run/{model}", json={"request_id": request_id}).json()["result"]
        return sorted(result.get("responses", ()), key=lambda one: one["id"])

    assert replicas(WRITES) == replicas(TELLS) == 0
    works: list[str] = []

    def works_on() -> None:
        """Runners have something to do all the time, for another model."""
        if not works or answers(CHAT, works[-1]):
            works.append(submit(CHAT, [{"prompt": f"Add {n}.", "max_tokens": 8} for n in range(8)]))

    def still(model: str) -> bool:
        works_on()
        return replicas(model) > 0

    works_on()
    for woken, asleep in ((WRITES, TELLS), (TELLS, WRITES)):
        made = submit(woken, ASKED[woken])

        def done(woken: str = woken, asleep: str = asleep, made: str = made) -> list[dict]:
            works_on()
            assert replicas(asleep) == 0
            return answers(woken, made)

        found = wait_for(done, 240)
        assert all(one["success"] for one in found) and len(found) == len(ASKED[woken])
        alone = http.post(f"/run/{woken}", json=ASKED[woken][1]).json()["result"]
        assert said(found[1]["result"]) == said(alone)
        # Nothing is left to be done there, though runners go on.
        wait_for(lambda woken=woken: not still(woken), 240)
