"""Bad input over HTTP: 4xx with the documented code, a message that says what to do, at once, and nobody else
notices.
"""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT, EMBED, RERANK

MESSAGES = [{"role": "user", "content": "hi"}]
CASES = [
    ("empty body", CHAT, b"", 400, 3003),
    ("not JSON", CHAT, b"{prompt:", 400, 5006),
    ("an array", CHAT, b"[1]", 400, 5006),
    ("invalid UTF-8", CHAT, b'{"prompt": "\xff"}', 400, 5006),
    ("NaN", CHAT, b'{"prompt": "x", "temperature": NaN}', 400, 5006),
    ("1e309", CHAT, b'{"prompt": "x", "temperature": 1e309}', 400, 5006),
    ("deep nesting", CHAT, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, 5006),
    ("nothing to do", CHAT, {}, 400, 5006),
    ("prompt and messages", CHAT, {"prompt": "x", "messages": MESSAGES}, 400, 5006),
    ("prompt is a number", CHAT, {"prompt": 7}, 400, 5006),
    ("messages is text", CHAT, {"messages": "hi"}, 400, 5006),
    ("no messages", CHAT, {"messages": []}, 400, 5006),
    ("unknown role", CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, 5006),
    ("negative max_tokens", CHAT, {"prompt": "x", "max_tokens": -1}, 400, 5006),
    ("zero max_tokens", CHAT, {"prompt": "x", "max_tokens": 0}, 400, 5006),
    ("text for a number", CHAT, {"prompt": "x", "max_tokens": "10"}, 400, 5006),
    ("true for a number", CHAT, {"prompt": "x", "max_tokens": True}, 400, 5006),
    ("negative temperature", CHAT, {"prompt": "x", "temperature": -0.1}, 400, 5006),
    ("stream is text", CHAT, {"prompt": "x", "stream": "yes"}, 400, 5006),
    ("empty stop string", CHAT, {"prompt": "x", "stop": ""}, 400, 5006),
    ("a thousand stop strings", CHAT, {"prompt": "x", "stop": ["a"] * 1000}, 400, 5006),
    ("more choices than 128", CHAT, {"prompt": "x", "n": 129}, 400, 5006),
    ("bias outside of the vocabulary", CHAT, {"prompt": "x", "logit_bias": {"99999999": 1}}, 400, 5006),
    ("longer than the context", CHAT, {"prompt": "word " * 6000}, 413, 5021),
    ("more output than context", CHAT, {"prompt": "x", "max_tokens": 5000}, 413, 5021),
    ("a megabyte of prompt", CHAT, {"prompt": "x" * 1_000_000}, 413, 5021),
    ("a body over the limit", CHAT, {"prompt": "x" * 2_000_000}, 413, 3006),
    ("unknown model", "@cf/no/such", {"prompt": "x"}, 400, 5007),
    ("no such LoRA adapter", CHAT, {"prompt": "x", "lora": "mine"}, 404, 3037),
    ("text is missing", EMBED, {}, 400, 5006),
    ("text is a number", EMBED, {"text": 5}, 400, 5006),
    ("too long to embed", EMBED, {"text": "word " * 2000}, 413, 5021),
    ("no query", RERANK, {"contexts": [{"text": "x"}]}, 400, 5006),
    ("no contexts", RERANK, {"query": "x", "contexts": []}, 400, 5006),
    ("context is text", RERANK, {"query": "x", "contexts": ["x"]}, 400, 5006),
    ("top_k is zero", RERANK, {"query": "x", "contexts": [{"text": "x"}], "top_k": 0}, 400, 5006),
]


@pytest.mark.parametrize(("name", "model", "body", "status", "code"), CASES, ids=[c[0] for c in CASES])
def test_refused_with_the_documented_code(http, name, model, body, status, code):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(f"/run/{model}", content=content)
    assert answer.status_code == status, answer.text
    envelope = answer.json()
    assert envelope["success"] is False and envelope["errors"][0]["code"] == code
    message = envelope["errors"][0]["message"]
    assert len(message) > 20 and "Traceback" not in message and "0x" not in message
    assert len(message) < 2000
    assert answer.headers["cf-ray"]


@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer wrong", "Basic abc", "Bearer " + "x" * 5000])
def test_wrong_key(stack, key):
    headers = {} if key is None else {"Authorization": key}
    for path in (f"/client/v4/accounts/{ACCOUNT}/ai/run/{CHAT}", "/v1/chat/completions"):
        answer = httpx.post(stack.url + path, json={"prompt": "x"}, headers=headers, timeout=120)
        assert answer.status_code == 401 and answer.json()["errors"][0]["code"] == 10000


def test_every_route_asks_for_the_key_unless_it_says_otherwise(stack):
    from serve_app.gateway.http.app import endpoints

    listed = endpoints(_NoGateway())
    page = "/dashboard"
    dashboard = {page, page + "/{page:path}", page + "/static/{version}/{path:path}", page + "/session"}
    about = {"/health", "/openapi.json", "/docs", "/ping", "/version"}
    assert {e.path for e in listed if e.scopes is None} == about | dashboard
    assert len(listed) > 40
    for endpoint in listed:
        path = endpoint.path.replace("{account}", ACCOUNT).replace("{model:path}", CHAT)
        path = path.replace("{version}/{path:path}", "x/index.html")
        path = path.replace("{page:path}", "")
        # Whoever signs in shows the key in the body.
        signs_in = (endpoint.method, path) == ("POST", "/dashboard/session")
        answer = httpx.request(endpoint.method, stack.url + path, json={"key": "wrong"} if signs_in else None)
        expected = 401 if signs_in or endpoint.scopes is not None else 200
        assert answer.status_code == expected, (endpoint.method, path, answer.text)


class _NoGateway:
    """Routes are listed, not called."""


def test_other_accounts_unknown_paths_and_methods(stack):
    other = httpx.post(
        f"{stack.url}/client/v4/accounts/other/ai/run/{CHAT}", json={"prompt": "x"}, headers=stack.headers, timeout=120
    )
    assert other.status_code == 403 and other.json()["errors"][0]["code"] == 10000
    missing = httpx.get(f"{stack.url}/client/v4/accounts/{ACCOUNT}/nothing", headers=stack.headers, timeout=120)
    assert missing.status_code == 404 and missing.json()["errors"][0]["code"] == 7003
    nameless = httpx.get(f"{stack.api}/run/{CHAT}", headers=stack.headers, timeout=120)
    assert nameless.status_code == 400 and "request_id" in nameless.json()["errors"][0]["message"]
    method = httpx.put(f"{stack.api}/run/{CHAT}", headers=stack.headers, timeout=120)
    assert method.status_code == 405


def test_bad_requests_do_not_disturb_a_good_one(stack, http, run):
    body = {"prompt": "What does len do?", "temperature": 0, "max_tokens": 20}
    before = run(CHAT, body)["response"]
    for _, model, bad, _, _ in CASES:
        http.post(f"/run/{model}", content=bad if isinstance(bad, bytes) else json.dumps(bad).encode())
    assert run(CHAT, body)["response"] == before
    assert stack.health()[0] == 200


def test_bodies_that_never_end_or_never_stop(stack, run):
    """Clients that hold a connection open disturb nobody; a body without a declared length is bounded all the same."""
    address = httpx.URL(stack.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {stack.key}\r\n"
    held = [socket.create_connection((address.host, address.port), timeout=120) for _ in range(40)]
    try:
        for i, connection in enumerate(held):
            rest = "Content-Length: 1000\r\n\r\n{" if i % 2 else "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
            connection.sendall((head + rest).encode())
        assert run(CHAT, {"prompt": "What does len do?", "temperature": 0})["response"]
    finally:
        for connection in held:
            connection.close()

    def endless():
        # Beyond what a chat with pictures may have, which a model of this server takes.
        for _ in range(40):
            yield b"x" * (1 << 20)

    try:
        answer = httpx.post(f"{stack.url}/v1/messages", headers=stack.headers, content=endless(), timeout=120)
        assert answer.status_code == 413 and answer.json()["errors"][0]["code"] == 3006
    except (httpx.WriteError, httpx.ReadError):
        pass  # the answer came, and the connection was closed, before all was sent
