"""Limits over HTTP: refused before any work in every dialect, and nothing is held when work ends, however it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app.api.types import GenerateRequest
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Account
from serve_app.state.callers.limits import read_limits
from serve_app.state.spending import leases
from serve_app.state.spending.quotas import NEURONS, STREAMS, TOKENS, Quota
from tests.tasks.conftest import ACCOUNT, Served
from tests.tasks.test_backend import EchoBackend
from tests.tasks.test_receipts import TEXT
from tests.tasks.test_settle import BODIES, CHAT, EMBED, encoded

# Three words and 9 tokens of answer could cost 3 * 909 + 9 * 1818 millionths of a neuron.
WORST = (3 * 909 + 9 * 1818) / 10**6


@asynccontextmanager
async def limited(serve: Any, *asked: Any, models=(CHAT,), **limits: Any) -> AsyncIterator[Served]:
    """A gateway whose account has ``limits``."""
    async with serve(*asked, models=models) as served:
        await served.gateway.state.start()
        served.gateway.state.admin.create("local", limits=limits)
        served.gateway.state._fill()
        served.gateway.backends[CHAT] = EchoBackend()
        yield served


def held(served: Served) -> dict[str, int]:
    return {quota.kind: held for quota, (held, _) in served.gateway.state.allowance.leases.held().items() if held}


def bounded(body: dict[str, Any], path: str) -> dict[str, Any]:
    """With ``max_tokens``, by whatever name."""
    if path.startswith("/api"):
        return {**body, "options": {"num_predict": 9}, "stream": False}
    return {**body, "max_output_tokens" if path.endswith("responses") else "max_tokens": 9}


@pytest.mark.parametrize("path", TEXT)
async def test_a_budget_in_every_dialect(serve, path, monkeypatch) -> None:
    body = bounded({name: value for name, value in TEXT[path].items() if name != "stream_options"}, path)
    async with limited(serve, neurons_per_day=f"{WORST - 1e-6:.6f}") as served:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 429, answer.text
        [error] = answer.json()["errors"]
        assert error["code"] == 3036
        assert f"is {WORST - 1e-6:.6f}".rstrip("0") in error["message"]
        assert f"could cost up to {WORST:.6f} (3 prompt tokens, max_tokens 9)" in error["message"]
        assert int(answer.headers["Retry-After"]) > 0 and answer.headers["x-should-retry"] == "false"
        assert served.endings == [("text-generation", "refused")] and not served.gateway.backends[CHAT].closed
        # As much as it could cost is enough.
        served.gateway.state.admin.change("local", limits={"neurons_per_day": f"{WORST:.6f}"})
        served.gateway.state._fill()
        monkeypatch.setattr(leases, "FRESH_S", 0.0)  # or what was refused is refused from memory for a moment
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text


async def test_openai_s_clients_know_the_word(serve) -> None:
    async with limited(serve, money_per_month="0.000000001") as served:
        body = {name: value for name, value in TEXT["/v1/chat/completions"].items() if name != "stream_options"}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.json()["error"]["code"] == "insufficient_quota"
        assert "monthly budget of this account is 0.000000001 in USD" in answer.json()["error"]["message"]


async def test_every_choice_and_the_default_are_reserved(serve) -> None:
    """Of ``n`` choices each may take ``max_tokens``, 64 of the backend's where it is not sent."""
    async with limited(serve, tokens_per_minute=3 + 2 * 64 - 1) as served:
        body = {"model": CHAT, "prompt": "one two three", "n": 2}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 429 and answer.json()["errors"][0]["code"] == 971
        assert "up to 131 (3 prompt tokens, max_tokens 64, 2 choices)" in answer.text
        answer = await served.http.post("/v1/completions", json={**body, "max_tokens": 62})
        assert answer.status_code == 200 and held(served) == {TOKENS: answer.json()["usage"]["total_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_ended_holds_what_it_cost_until_the_ledger_has_it(serve, stream) -> None:
    async with limited(serve, neurons_per_day="100", streams=2) as served:
        answer = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={"prompt": "one two three", "stream": stream})
        assert answer.status_code == 200
        async with asyncio.timeout(60):
            while held(served):
                assert set(held(served)) == {NEURONS}
                await asyncio.sleep(0.02)
        # What it cost is spent: the ledger says so.
        cost = 2 * 909 + 91 + 3 * 1818
        assert served.gateway.state.allowance.leases.left(Quota("local", "", NEURONS)) == 100 * 10**6 - cost


async def test_who_leaves_and_what_breaks_hold_nothing(serve) -> None:
    async with limited(serve, neurons_per_day="100", streams=8, tokens_per_minute=10_000) as served:
        [model] = served.gateway.models
        caller = served.gateway.state.accounts.own()
        request = GenerateRequest(CHAT, None, "one two three", True, SamplingParams(max_tokens=9), n=5)
        events = await served.gateway.generate(model, request, caller)
        assert held(served) == {}  # nothing has begun
        await anext(events)
        assert held(served)[STREAMS] == 5 and held(served)[TOKENS] == 3 + 5 * 9
        await events.aclose()
        assert STREAMS not in held(served) and NEURONS not in held(served)
        answer = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={"prompt": "one break"})
        assert answer.status_code == 500 and STREAMS not in held(served) and NEURONS not in held(served)


async def test_encoders_have_budgets(serve) -> None:
    async with limited(serve, encoded, models=(EMBED,), tokens_per_minute=3) as served:
        answer = await served.http.post(f"{ACCOUNT}/run/{EMBED}", json=BODIES[EMBED])
        assert answer.status_code == 429 and "3 tokens of this account per minute" in answer.text
        assert served.endings == [("text-embeddings", "refused")]


async def test_requests_per_minute_of_the_account(serve) -> None:
    async with limited(serve, encoded, models=(EMBED,), requests_per_minute=1) as served:
        answers = [await served.http.post(f"{ACCOUNT}/run/{EMBED}", json=BODIES[EMBED]) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[0].headers["Ratelimit"].startswith('"account";r=0;t=')
        assert answers[1].json()["errors"][0]["code"] == 971 and int(answers[1].headers["Retry-After"]) <= 60


async def test_models_of_the_paid_plan(serve, record, tmp_path) -> None:
    model = record("text-generation", "decode")
    written = tmp_path / "models" / "text-generation.yaml"
    written.write_text(written.read_text() + "properties: {require_workers_paid: true}\n")
    async with serve(models=(model,), plan="free") as served:
        served.gateway.backends[model] = EchoBackend()
        answer = await served.http.post(f"{ACCOUNT}/run/{model}", json={"prompt": "one"})
        assert answer.status_code == 403 and answer.json()["errors"][0]["code"] == 5035
        listed = (await served.http.get(f"{ACCOUNT}/models/search")).json()["result"][0]["properties"]
        assert {"property_id": "require_workers_paid", "value": "true"} in listed
        served.gateway.state.accounts.fill({"local": Account("local", limits=read_limits({"plan": "paid"}))})
        assert (await served.http.post(f"{ACCOUNT}/run/{model}", json={"prompt": "one"})).status_code == 200
