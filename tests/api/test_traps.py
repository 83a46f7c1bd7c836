"""What breaks real clients, point by point: each of these did so at some server, and none may here.

The numbers are those of the twelve traps that clients of Workers AI fall into, then of complaints about servers.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from starlette.routing import Match

from serve_app.api import listing as models
from serve_app.api.envelopes import envelope, openai_body
from serve_app.api.errors import InvalidInput, OutOfCapacity, UnknownModel
from serve_app.api.fields.body import parse_body
from serve_app.api.multi_vector import Reading
from serve_app.api.openai import read as openai
from serve_app.api.openai import write as openai_answers
from serve_app.api.responses import read as responses
from serve_app.api.retry_after import wait_told
from serve_app.api.types import ChoiceDone, Event, TextDelta, ToolCallDelta, Usage
from serve_app.gateway.http.app import build_http
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.reranking.write import render_rerank
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_embeddings.write import render_embed
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.tasks.text_generation.write import render_generate, stream_generate
from tests.api.clients import MODEL, client, cloudflare, sent_by
from tests.api.test_answers import frames, stream

APP = build_http(None)  # type: ignore[arg-type]
USAGE = Usage(21, 3, 16, 0.25)
TEXT: list[Event] = [TextDelta(0, "Li"), TextDelta(0, "ma."), ChoiceDone(0, "stop"), USAGE]
ASK: list[Any] = [{"role": "user", "content": "hi"}]


def routed(method: str, path: str) -> tuple[str, dict[str, str]] | None:
    """The route that answers, and the parameters it reads from the path (decoded, as servers hand it over)."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    for route in APP.routes:
        match, found = route.matches(scope)
        if match == Match.FULL:
            return route.path, found["path_params"]  # type: ignore[attr-defined]
    return None


def test_1_model_ids_come_with_slashes_raw_or_encoded():
    asked = sent_by(lambda http: cloudflare(http).ai.run(MODEL, account_id="local", prompt="x"))
    assert b"%2F" in asked.url.raw_path
    # asked.url.path is decoded, as ASGI servers do it; a raw one looks the same there.
    assert routed("POST", asked.url.path) == (
        "/client/v4/accounts/{account}/ai/run/{model:path}",
        {"account": "local", "model": MODEL},
    )


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/a/g/workers-ai/@cf/x/y", "/v1/{account}/{gateway}/workers-ai/{model:path}"),
        ("/v1/a/g/workers-ai/run/@cf/x/y", "/v1/{account}/{gateway}/workers-ai/run/{model:path}"),
        ("/v1/a/g/workers-ai/v1/chat/completions", "/v1/{account}/{gateway}/workers-ai/v1/chat/completions"),
        ("/v1/a/g/compat/chat/completions", "/v1/{account}/{gateway}/compat/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/client/v4/accounts/a/ai/v1/v1/messages", "/client/v4/accounts/{account}/ai/v1/v1/messages"),
    ],
)
def test_paths_that_clients_have_built_in_reach_their_own_route(path, route):
    found = routed("POST", path)
    assert found is not None and found[0] == route


async def test_3_and_5_one_usage_at_the_end_and_done():
    request = parse_generate({"prompt": "x", "stream": True}, MODEL)
    sent = await frames(stream_generate(request, stream(TEXT)))
    assert sent[-1] == "[DONE]" and ["usage" in frame for frame in sent[:-1]] == [False, False, True]
    last = sent[-2]
    assert last["response"] == "" and last["finish_reason"] == "stop"
    assert all(isinstance(value, (int, dict)) for name, value in last["usage"].items() if name != "neurons")
    # A frame with both forms is printed twice by Cloudflare's own provider for the AI SDK.
    assert not any("choices" in frame for frame in sent[:-1])


def test_6_pages_end():
    records = [
        {"id": str(i), "source": 1, "name": f"@cf/a/m{i}", "description": "", "created_at": "2026-01-01 00:00:00.000",
         "task": {"id": "t", "name": "T", "description": ""}, "tags": [], "properties": []}
        for i in range(3)
    ]  # fmt: skip
    for search in (models.search, models.search_authors, models.search_tasks):
        assert search(records, {"page": "2", "per_page": "3"})["result"] == []
        with pytest.raises(InvalidInput, match="page"):
            search(records, {"page": "0"})
    pages = [models.search(records, {"page": str(page), "per_page": "2"})["result"] for page in (1, 2, 3)]
    assert [len(page) for page in pages] == [2, 1, 0]
    assert models.search_authors(records, {})["result"] == [{"id": "a", "name": "a"}]
    assert models.search_authors(records, {"search": "zzz"})["result"] == []
    assert models.search_tasks(records, {})["result"] == [{"id": "t", "name": "T", "description": ""}]


def test_8_bodies_are_read_by_what_they_are():
    # Their labels never reach the reader; a byte order mark does.
    assert parse_body(b'\xef\xbb\xbf{"prompt": "x"}') == {"prompt": "x"}


NULLS = ("stop", "tools", "tool_choice", "seed", "top_p", "top_k", "response_format", "logprobs", "n", "stream", "user",
         "chat_template_kwargs",
         "max_tokens", "max_completion_tokens", "reasoning_effort", "stream_options", "options", "functions", "lora",
         "frequency_penalty", "presence_penalty", "logit_bias", "metadata", "service_tier")  # fmt: skip
HARMLESS: dict[str, Any] = {
    "tools": [],
    "functions": [],
    "stop": [],
    "reasoning_effort": "low",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "store": True,
    "user": "u",
    "verbosity": "low",
    "parallel_tool_calls": True,
    "web_search_options": {},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "invented": {"by": ["somebody"]},
}


def test_9_nulls_and_unknown_fields_are_no_errors():
    for extra in ({name: None for name in NULLS}, HARMLESS):
        chat = openai.parse_chat({"model": MODEL, "messages": ASK, **extra})
        run = parse_generate({"messages": ASK, **extra}, MODEL)
        assert chat.tools is None and run.tools is None and chat.stop == () and run.n == 1
    text = {"model": MODEL, "prompt": "x", **{name: None for name in NULLS}}
    assert openai.parse_completions(text)[0].prompt == "x"
    assert responses.parse_responses({"model": MODEL, "input": "x", **{name: None for name in NULLS}}).turn


def test_9_schemas_of_tools_go_through_as_they_are():
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    request = openai.parse_chat({"model": MODEL, "messages": ASK, "tools": [tool]})
    assert request.tools and request.tools[0]["function"]["parameters"] == parameters


def test_11_errors_carry_a_number_and_an_empty_result():
    found = envelope(UnknownModel("@cf/x/y"))
    assert found["result"] == {} and found["success"] is False and found["errors"][0]["code"] == 5007
    assert found["errors"][0]["message"].startswith("AiError: ")
    both = openai_body(UnknownModel("@cf/x/y"))
    assert both["error"]["message"] and both["errors"][0]["code"] == 5007


def test_12_refusals_for_capacity_say_when_to_come_back():
    assert OutOfCapacity(retry_after=0.2).headers == {"Retry-After": "1"}
    assert [wait_told(OutOfCapacity(retry_after=wait).headers) for wait in (0, 1.4, 2.6, 86400)] == [1, 1, 3, 86400]
    assert [wait_told(headers) for headers in ({}, {"Retry-After": "soon"}, {"Retry-After": "-1"})] == [None] * 3


def test_max_completion_tokens_counts_and_wins():
    sent = sent_by(
        lambda http: client(http).chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=5, max_completion_tokens=7
        )
    )
    request = openai.parse_chat(sent.content)
    assert request.sampling.max_tokens == 7 and request.max_tokens_given


def test_forced_tools_are_not_promised_in_vain():
    tool = {"name": "f", "parameters": {}}
    for choice in ("any", "required", {"type": "function", "function": {"name": "f"}}):
        for parse in (
            lambda body: openai.parse_chat({"model": MODEL, **body}),
            lambda body: parse_generate(body, MODEL),
        ):
            try:
                request = parse({"messages": ASK, "tools": [tool], "tool_choice": choice})
            except InvalidInput as refused:
                assert "tool_choice" in str(refused)
            else:
                # Where it is taken, `any` (LangChain's word) means the same as `required`.
                assert request.tool_choice not in (None, "auto", "none", "any")


def test_what_was_called_is_what_finished():
    events: list[Event] = [ToolCallDelta(0, 0, "c", "f", "{}"), ChoiceDone(0, "tool_calls"), USAGE]
    result = render_generate(parse_generate({"prompt": "x"}, MODEL), events)["result"]
    assert result["finish_reason"] == result["choices"][0]["finish_reason"] == "tool_calls"


def test_readers_of_response_and_of_choices_both_find_the_answer():
    result = render_generate(parse_generate({"prompt": "x"}, MODEL), TEXT)["result"]
    assert result["response"] == result["choices"][0]["message"]["content"] == "Lima."
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_embeddings_as_base64_when_asked_and_as_numbers_otherwise():
    vectors = np.array([[0.5, -1.25], [3.0, 0.0]], np.float32)

    def answer(sent: httpx.Request) -> httpx.Response:
        request = openai.parse_embeddings(sent.content)
        return httpx.Response(200, content=orjson.dumps(openai_answers.render_embeddings(request, vectors, USAGE)))

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = client(http).embeddings.create(model=MODEL, input=["a", "b"], **form)
            given = found.data[1].embedding
            if isinstance(given, str):
                given = np.frombuffer(base64.b64decode(given), "<f4").tolist()
            assert given == [3.0, 0.0]


def test_the_three_forms_of_bge_m3():
    vectors = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], np.float32)

    def result(body: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
        return render_embed(parse_embed(body, "@cf/baai/bge-m3"), Reading(rows), USAGE)["result"]

    contexts = [{"text": "b"}, {"text": "c"}]
    assert result({"text": ["a", "b", "c"]}, vectors)["data"] == vectors.tolist()
    found = result({"contexts": contexts, "truncate_inputs": True, "text": ""}, vectors[:2])
    assert found["response"] == vectors[:2].tolist() and found["shape"] == [2, 2] and found["pooling"] == "mean"
    scored = result({"query": "a", "contexts": contexts, "truncate_inputs": False}, vectors)["response"]
    assert scored == [{"id": 1, "score": 1.0}, {"id": 0, "score": 0.0}]


def test_rerankers_cut_to_top_k():
    request = parse_rerank({"query": "q", "contexts": [{"text": t} for t in "abc"], "top_k": 2, "text": ""}, MODEL)
    found = render_rerank(request, [0.1, 0.9, 0.5], USAGE)["result"]["response"]
    assert [item["id"] for item in found] == [1, 2]


def test_batches_are_refused_before_anything_runs():
    for body in ({"text": "", "requests": [{"prompt": "x"}]}, {"text": "", "request_id": "r"}):
        with pytest.raises(InvalidInput, match="batches"):
            parse_generate(body, MODEL)


def test_duplicate_keys_take_the_last_as_json_readers_do():
    assert parse_body(b'{"prompt": "a", "prompt": "b"}') == json.loads(b'{"prompt": "a", "prompt": "b"}')
