"""What an estimate says before a request runs is what the request then uses and costs, by every dialect's route."""

from __future__ import annotations

import time
from typing import Any

import pytest

from serve_app.kv.keys import BLOCK_TOKENS
from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT

# Longer than a few blocks of the cache, and of no other test.
WORDS = " ".join(f"estimate {n} of os.path.join" for n in range(30))
ASK = [{"role": "user", "content": WORDS}]
TOKENS = 6
ROUTES: dict[str, dict[str, Any]] = {
    f"/client/v4/accounts/{ACCOUNT}/ai/run/{CHAT}": {"messages": ASK, "max_tokens": TOKENS, "temperature": 0},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": TOKENS, "temperature": 0},
    "/v1/completions": {"prompt": WORDS, "max_tokens": TOKENS, "temperature": 0},
    "/v1/responses": {"input": WORDS, "max_output_tokens": TOKENS, "temperature": 0, "store": False},
    "/v1/messages": {"messages": ASK, "max_tokens": TOKENS, "temperature": 0},
    "/api/chat": {"messages": ASK, "options": {"num_predict": TOKENS, "temperature": 0}, "stream": False},
    "/api/generate": {"prompt": WORDS, "options": {"num_predict": TOKENS, "temperature": 0}, "stream": False},
}


@pytest.mark.parametrize("path", ROUTES, ids=lambda path: path.removeprefix(f"/client/v4/accounts/{ACCOUNT}/ai/"))
def test_what_was_foreseen_is_what_happens(stack, http, path):
    def post(**more: Any) -> Any:
        body = {"model": CHAT, **ROUTES[path]}
        if options := {**body.get("options", {}), **more}:
            body["options"] = options
        answer = http.post(stack.url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer, answer.json().get("result", answer.json())

    post()
    # Workers tell gateways what they keep; a gateway has heard of it when it expects nearly all of the prompt.
    until = time.monotonic() + 30
    while (told := post(estimate=True)[1])["cached_tokens"] < told["prompt_tokens"] // 2:
        assert time.monotonic() < until, told
        time.sleep(0.1)
    answer, _ = post()
    receipt = f"/client/v4/accounts/{ACCOUNT}/ai/usage/{answer.headers['cf-ray']}"
    while (found := http.get(stack.url + receipt)).status_code == 404:
        assert time.monotonic() < until, found.text
        time.sleep(0.1)
    entry = found.json()["result"]
    assert entry["units"]["input_tokens"] == told["prompt_tokens"]
    # Whole blocks are foreseen; of the last one the worker may have a part.
    assert told["cached_tokens"] == told["units"]["expected"]["cached_tokens"]
    assert 0 <= entry["units"]["cached_tokens"] - told["cached_tokens"] < BLOCK_TOKENS
    assert told["neurons"]["least"] <= entry["neurons"] <= told["neurons"]["most"]
    assert float(told["cost"]["least"]) <= float(entry["cost"]["amount"]) <= float(told["cost"]["most"])
