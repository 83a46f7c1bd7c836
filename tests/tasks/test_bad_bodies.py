"""Every newer route and more than fifty bad bodies: each is refused in the words of its dialect, and none is a failure.

No worker is there: whatever gets past the readers finds all of them full.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.fuzz.bodies import places
from serve_app.api.errors import OutOfCapacity

CHAT, RERANK = "@cf/pico/pico-instruct", "@cf/pico/pico-reranker"
TALK = [{"role": "user", "content": "hi"}]
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
# A right body of each route.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"model": RERANK, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "truncate": True},
    "/v2/rerank": {"model": RERANK, "query": "a", "documents": ["b", "c"], "top_n": 1, "max_tokens_per_doc": 9},
    "/rerank": {"model": RERANK, "query": "a", "texts": ["b", "c"], "raw_scores": True, "truncate": True},
    "/v1/score": {"model": RERANK, "text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 5},
    "/tokenize": {"model": CHAT, "messages": TALK, "return_token_strs": True, "add_generation_prompt": True},
    "/detokenize": {"model": CHAT, "tokens": [1, 2, 3]},
    "/api/chat": {"model": CHAT, "messages": TALK, "options": {"num_predict": 5, "stop": ["a"]}, "stream": False},
    "/api/generate": {"model": CHAT, "prompt": "hi", "system": "so", "options": {"seed": 5}, "stream": False},
    "/api/embed": {"model": CHAT, "input": ["a", "b"], "truncate": True, "dimensions": 5},
    "/api/embeddings": {"model": CHAT, "prompt": "a", "options": {"num_ctx": 5}},
    "/api/show": {"model": CHAT, "verbose": True},
    "/v1/responses": {"model": CHAT, "input": [ITEM, CALL], "truncation": "auto", "metadata": {"a": "b"}},
    "/v1/responses/compact": {"model": CHAT, "input": [ITEM, CALL], "instructions": "so"},
    "/v1/responses/input_tokens": {"model": CHAT, "input": [ITEM, CALL], "instructions": "so"},
    "/v1/conversations": {"metadata": {"a": "b"}, "items": [ITEM, CALL]},
}
STRANGE: list[Any] = [None, True, 0, -1, 2**64, 1e308, "", "x" * 600, "a\x00b", [], {}, [None], [[5]], {"type": "x"}]
NO_OBJECTS = [b"", b" ", b"{", b"[]", b"null", b'"x"', b"5", b"\xff", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[" * 5000]


async def full(*_: Any) -> Any:
    raise OutOfCapacity


def put(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> bytes:
    """JSON of ``body`` with another value in that place."""
    changed = json.loads(json.dumps(body))
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(changed).encode()


@pytest.mark.parametrize("path", ROUTES)
async def test_bad_bodies(serve, path) -> None:
    body = ROUTES[path]
    changed = [(place, value) for place in places(body) for value in STRANGE]
    # Each place and each value in turn, as many as it takes.
    bad = [*NO_OBJECTS, *(put(body, *one) for one in changed[:: max(len(changed) // 90, 1)])]
    refused = 0
    async with serve(full, models=(CHAT, RERANK)) as served:
        for content in bad:
            answer = await served.http.post(path, content=content)
            assert answer.status_code < 500, (content[:300], answer.text[:300])
            if answer.status_code >= 400:
                refused += answer.status_code != 429
                told = answer.json()
                assert told["errors"][0]["message"] and told["error"], (content[:300], told)
    assert refused >= min(50, len(bad) // 2)
