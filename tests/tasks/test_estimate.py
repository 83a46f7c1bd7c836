"""What a request would cost is told in every dialect, without running it, and holds for what then runs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.tasks.conftest import ACCOUNT, KEY
from tests.tasks.test_backend import TURN, WORDS, EchoBackend
from tests.tasks.test_settle import BODIES, EMBED, RERANK, encoded

BODIES_OF_DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/completions": {"prompt": WORDS},
    "/v1/responses": {"input": WORDS},
    "/v1/messages": {"messages": TURN, "max_tokens": 9, "system": "Be brief."},
    "/api/chat": {"messages": TURN},
    "/api/generate": {"prompt": WORDS},
}


@pytest.fixture
async def echo(serve, record):
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.model = model
        served.backend = served.gateway.backends[model] = EchoBackend()
        yield served


def check(told: dict[str, Any], *, output: int = 64) -> None:
    """Eleven dollars a million tokens are a neuron a token; cached ones cost as much."""
    assert told["object"] == "estimate" and told["prompt_tokens"] == 3 and told["cached_tokens"] == 1
    assert told["wait_s"] == 0.5 and told["ttft_s"] == 0.75
    units = {"input_tokens": 3, "cached_tokens": 1, "output_tokens": 3}
    assert told["units"]["expected"] == units
    assert told["units"]["least"] == {"input_tokens": 3, "cached_tokens": 2, "output_tokens": 0}
    assert told["units"]["most"] == {"input_tokens": 3, "cached_tokens": 0, "output_tokens": output}
    assert told["neurons"] == {"least": 3.0, "expected": 6.0, "most": 3.0 + output}
    assert told["cost"]["currency"] == "USD" and told["cost"]["expected"] == "0.000066"


@pytest.mark.parametrize("path", BODIES_OF_DIALECTS)
async def test_a_dialect_tells_what_its_request_would_cost(echo, path):
    body = {"model": echo.model, **BODIES_OF_DIALECTS[path]}
    chats = path in ("/v1/chat/completions", "/v1/responses")
    # What a client asks for no length gets in Ollama's dialect is all the room there is.
    output = 9 if "max_tokens" in body else 4096 if chats else None
    asked = [
        await echo.http.post(path, json={**body, "options": {"estimate": True}}),
        await echo.http.post(path, json=body, headers={"x-estimate": "true"}),
        await echo.http.post("/v1/estimate", json=body, params={"route": path}),
    ]
    if not path.startswith("/api/"):
        asked.append(await echo.http.post("/v1/estimate", json=body))
    for answer in asked:
        assert answer.status_code == 200, answer.text
        check(answer.json(), output=output or answer.json()["units"]["most"]["output_tokens"])
    assert not echo.settled and not echo.backend.closed
    if not path.startswith("/api/"):  # whose answers stream and count otherwise
        whole = (await echo.http.post(path, json=body)).json()["usage"]
        used = echo.settled[-1].usage.micro_neurons / 1e6
        assert 3.0 <= used == whole.get("neurons", used) <= asked[0].json()["neurons"]["most"]


async def test_native_routes_and_the_handle_tell_it_in_the_envelope(echo):
    body = {"messages": TURN}
    for answer in (
        await echo.http.post(f"{ACCOUNT}/run/{echo.model}", json={**body, "options": {"estimate": True}}),
        await echo.http.post(f"{ACCOUNT}/estimate/{echo.model}", json=body),
        await echo.http.post(
            f"{ACCOUNT}/run", json={"model": echo.model, "input": body, "options": {"estimate": True}}
        ),
    ):
        assert answer.status_code == 200 and answer.json()["success"] is True, answer.text
        check(answer.json()["result"])
    asking = {**body, "options": {"estimate": True}}
    check((await echo.gateway.run_handle(echo.model, asking))["result"])
    check([frame async for frame in echo.gateway.stream_handle(echo.model, asking)][0])
    assert not echo.settled


async def test_answers_and_prompts_add_up(echo):
    chat = {"model": echo.model, "messages": TURN, "n": 4, "max_tokens": 10, "min_tokens": 2}
    told = (await echo.http.post("/v1/estimate", json=chat)).json()
    assert [told["units"][case]["output_tokens"] for case in ("least", "expected", "most")] == [8, 12, 40]
    many = {"model": echo.model, "prompt": [WORDS, "four five"], "max_tokens": 10}
    told = (await echo.http.post("/v1/estimate", json=many)).json()
    assert told["prompt_tokens"] == 5 and told["units"]["most"]["output_tokens"] == 20
    assert told["neurons"]["most"] == 25.0 and told["wait_s"] == 0.5


async def test_the_openai_sdk_can_ask(echo):
    client = AsyncOpenAI(
        api_key=KEY, base_url="http://here/v1", http_client=httpx.AsyncClient(transport=echo.http._transport)
    )
    told = await client.chat.completions.create(model=echo.model, messages=TURN, extra_headers={"x-estimate": "true"})
    check(told.model_dump(), output=4096)


async def test_what_is_wrong_is_refused_as_it_would_be(echo):
    wrong = await echo.http.post("/v1/estimate", json={"model": echo.model, "messages": TURN, "temperature": 9})
    assert wrong.status_code == 400 and wrong.json()["errors"][0]["code"] == 5006
    for body, params in (
        ({"model": echo.model, "messages": TURN}, {"route": "/v1/nothing"}),
        ({"model": echo.model, "prompt": WORDS}, {"route": "/v1/status"}),
        ({"messages": TURN}, {}),
        ({}, {}),
    ):
        refused = await echo.http.post("/v1/estimate", json=body, params=params)
        assert refused.status_code == 400, refused.text
    assert not echo.settled


async def test_reading_costs_what_was_told(serve):
    """Of texts and pairs everything is known before; bodies of every dialect are known by their fields."""
    elsewhere: dict[str, list[dict[str, Any]]] = {
        EMBED: [{"input": ["one", "two"]}, {"text": "one"}],
        RERANK: [
            {"query": "x", "documents": ["a", "b"]},
            {"text_1": "x", "text_2": ["a", "b"]},
            {"query": "x", "contexts": [{"text": "a"}]},
        ],
    }
    async with serve(encoded) as served:
        for model, body in BODIES.items():
            told = (await served.http.post(f"{ACCOUNT}/estimate/{model}", json=body)).json()["result"]
            assert (await served.http.post(f"{ACCOUNT}/run/{model}", json=body)).status_code == 200
            used = served.settled[-1].usage
            assert told["prompt_tokens"] == used.prompt_tokens > 0
            assert told["neurons"]["least"] == told["neurons"]["most"] == used.micro_neurons / 1e6
            for form in elsewhere[model]:
                answer = await served.http.post("/v1/estimate", json={"model": model, **form})
                assert answer.status_code == 200, answer.text
                assert answer.json()["object"] == "estimate" and answer.json()["prompt_tokens"] > 0
        assert len(served.settled) == len(BODIES)
