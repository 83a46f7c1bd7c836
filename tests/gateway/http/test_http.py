"""The HTTP application in this process: ids, keys, limits and routing. Nothing here reaches a model's workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cloudflare import AsyncCloudflare

from serve_app import __version__
from serve_app.api.errors import OutOfCapacity
from serve_app.config import ConfigError, cloudflare_rate_limits, load_settings
from serve_app.documents.convert import supported
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import hash_key

CHAT = "@cf/pico/pico-instruct"
KEY = "a key of this test alone"
ASK = {"model": CHAT, "messages": [{"role": "user", "content": "hi"}]}
COUNT = "/v1/messages/count_tokens"


async def nobody(*_: Any) -> Any:
    """In place of the workers, which this process does not have: every call finds them full."""
    raise OutOfCapacity


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = GatewaySettings(
        account="local",
        key_hashes=(hash_key(KEY),),
        cluster_secret="s",
        home=str(tmp_path),
        profile="local",
        rate_limits={"text-generation": 3},
    )
    gateway = Gateway(settings, nobody)
    for model in gateway.models:
        model.ready = True
    await gateway.inbox.start()
    transport = httpx.ASGITransport(build_http(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=bearer(KEY)) as client:
        yield client
    await gateway.inbox.aclose()
    gateway.state.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_answers_of_a_limited_task_say_how_much_is_left(http):
    for left in (2, 1, 0):
        answer = await http.post(COUNT, json=ASK)
        assert answer.status_code == 200 and answer.json()["input_tokens"] > 0
        assert answer.headers["ratelimit"].startswith(f'"text-generation";r={left};t=')
        assert answer.headers["ratelimit-policy"] == '"text-generation";q=3;w=60'
    for path, body in (
        ("/v1/chat/completions", ASK),
        (COUNT, ASK),
        (f"/client/v4/accounts/local/ai/run/{CHAT}", {"prompt": "x"}),
    ):
        refused = await http.post(path, json=body)
        assert refused.status_code == 429 and refused.json()["errors"][0]["code"] == 971
        assert 1 <= int(refused.headers["retry-after"]) <= 60 and "r=0" in refused.headers["ratelimit"]
    # Other tasks, and what runs no model, go on.
    assert (await http.get("/v1/models")).status_code == 200
    other = await http.post("/v1/embeddings", json={"model": CHAT, "input": "x"})
    assert other.status_code == 404 and "ratelimit" not in other.headers


async def test_full_workers_are_told_in_every_dialect(http):
    answer = await http.post("/v1/messages", json={**ASK, "max_tokens": 5})
    assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"]
    # The stream has not begun: an error is still a status.
    answer = await http.post("/v1/responses", json={"model": CHAT, "input": "x", "stream": True})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "3040"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(KEY), 200),
        ({"Authorization": f"bEaReR {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"X-Auth-Key": KEY}, 200),
        ({**bearer("a provider's"), "cf-aig-authorization": f"Bearer {KEY}"}, 200),
        ({**bearer("wrong"), "x-api-key": KEY}, 200),
        (bearer("wrong"), 401),
        ({"x-api-key": ""}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
    ],
)
async def test_keys(http, headers, status):
    del http.headers["Authorization"]
    answer = await http.get("/v1/models", headers=headers)
    assert answer.status_code == status


async def test_the_first_calls_of_tools_are_answered(http):
    """Without a key where other servers ask for none; lists of what is not here are empty."""
    for path in ("finetunes", "finetunes/public"):
        answer = await http.get(f"/client/v4/accounts/local/ai/{path}")
        assert answer.status_code == 200 and answer.json()["result"] == [] and answer.json()["success"] is True
    sdk = AsyncCloudflare(
        api_token=KEY, base_url="http://here/client/v4", http_client=httpx.AsyncClient(transport=http._transport)
    )
    listed = [(item.extension, item.mime_type) async for item in sdk.ai.to_markdown.supported(account_id="local")]
    assert listed == supported()
    assert await sdk.ai.finetunes.list(account_id="local") == []
    del http.headers["Authorization"]
    assert (await http.get("/ping")).status_code == 200
    assert (await http.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "https://a.example", None),
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("*",), "https://b.example", "*"),
    ],
)
async def test_pages_of_other_origins_may_call_where_a_setting_says_so(tmp_path, origins, origin, allowed):
    fields = {"account": "local", "key_hashes": (hash_key(KEY),), "cluster_secret": "s", "profile": "local"}
    gateway = Gateway(GatewaySettings(home=str(tmp_path), cors_origins=origins, **fields), nobody)
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    transport = httpx.ASGITransport(build_http(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        asked = await client.options("/v1/chat/completions", headers=asks)
        answer = await client.get("/v1/models", headers={**bearer(KEY), "Origin": origin})
    gateway.state.close()
    assert (
        asked.headers.get("access-control-allow-origin") == answer.headers.get("access-control-allow-origin") == allowed
    )
    assert asked.status_code == (200 if allowed else 400 if origins else 405)
    if not allowed:
        assert asked.json()["error"]["message"] and asked.json()["errors"][0]["code"] == (5006 if origins else 7001)
    exposed = answer.headers.get("access-control-expose-headers", "")
    assert answer.status_code == 200 and ("cf-ray" in exposed) == bool(origins)
    if allowed:
        assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers


async def test_headers_have_a_limit(http):
    answer = await http.get("/v1/models", headers={f"x-{i}": "v" * 1000 for i in range(20)})
    assert answer.status_code == 431 and answer.json()["errors"][0]["code"] == 3006
    many = await http.get("/v1/models", headers=[(f"x-{i}", "v" * 10) for i in range(1_500)])
    assert many.status_code == 431


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("PUT", f"/client/v4/accounts/local/ai/run/{CHAT}", "GET, HEAD, POST"),
        ("DELETE", "/health", "GET, HEAD"),
    ],
)
async def test_other_methods(http, method, path, allowed):
    answer = await http.request(method, path)
    assert answer.status_code == 405 and answer.headers["allow"] == allowed
    assert answer.json()["errors"][0]["code"] == 7001


@pytest.mark.parametrize(
    ("path", "key"),
    [("/v1/messages/x", "type"), ("/v1/nothing", "error"), ("/client/v4/x", "result"), ("/v1/models/", "error")],
)
async def test_what_is_not_there_is_told_in_the_words_of_the_dialect(http, path, key):
    answer = await http.get(path)
    assert answer.status_code == 404 and key in answer.json() and len(answer.headers["cf-ray"]) == 32


async def test_the_id_of_an_answer_is_in_every_line_of_the_log(http, caplog):
    with caplog.at_level(logging.INFO, "ray.serve"):
        answers = await asyncio.gather(*(http.get(f"/nothing/{i}") for i in range(5)))
    for i, answer in enumerate(answers):
        [line] = [record.getMessage() for record in caplog.records if f"/nothing/{i}" in record.getMessage()]
        assert line.startswith(f"[{answer.headers['cf-ray']}] ")
        assert answer.headers["request-id"] == answer.headers["cf-ray"]
    assert len({answer.headers["cf-ray"] for answer in answers}) == 5


def test_the_setting(tmp_path: Path):
    def limits(value: str) -> dict[str, int]:
        return load_settings({"SERVE_APP_HOME": str(tmp_path), "SERVE_APP_RATE_LIMITS": value}).rate_limits

    assert limits("") == {}
    assert limits("cloudflare") == cloudflare_rate_limits() and limits("cloudflare")["text-generation"] == 300
    assert limits("text-generation=5, reranking = 7,") == {"text-generation": 5, "reranking": 7}
    for wrong in ("text-generation=0", "text-generation=many", "poetry=5", "5"):
        with pytest.raises(ConfigError, match="SERVE_APP_RATE_LIMITS"):
            limits(wrong)
    (tmp_path / "config.yaml").write_text("rate_limits: {text-embeddings: 9}\n")
    assert limits("") == {"text-embeddings": 9}


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("@cf/no/such", 5007),
        ("gpt-4o", 5007),
        ("@cf/meta/llama-3.2-1b-instruct:free", 5007),
        ("../../etc/passwd", 3042),
        ("@cf/x/y z", 3042),
        ("@cf//x", 3042),
        ("@cf/x/", 3042),
        ("x\n", 3042),
        ("mödel", 3042),
    ],
)
async def test_unknown_models_and_malformed_names(http, model, code):
    answer = await http.post("/v1/chat/completions", json={**ASK, "model": model})
    assert answer.json()["errors"][0]["code"] == code
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    native = await http.post("/client/v4/accounts/local/ai/run", json={"model": model, "input": {"prompt": "x"}})
    assert native.json()["errors"][0]["code"] == code and native.status_code == (404 if code == 3042 else 400)


async def test_a_prompt_beyond_the_context_window(http):
    """400 where OpenAI's and Anthropic's clients ask, 413 natively; nothing blames a limit that nobody set."""
    long = {"model": CHAT, "messages": [{"role": "user", "content": "word " * 9000}]}
    answer = await http.post("/v1/chat/completions", json=long)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "max_tokens" not in answer.json()["error"]["message"] and answer.json()["errors"][0]["code"] == 5021
    answer = await http.post("/v1/messages", json={**long, "max_tokens": 5})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert "prompt is too long" in answer.json()["error"]["message"]
    answer = await http.post(f"/client/v4/accounts/local/ai/run/{CHAT}", json={"messages": long["messages"]})
    assert answer.status_code == 413 and answer.json()["errors"][0]["code"] == 5021
