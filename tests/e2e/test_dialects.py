"""The Anthropic and Responses dialects, the paths that clients have built in, and the published description, live."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from serve_app.gateway.neighbours.client import PASS
from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT, EMBED, RERANK
from tests.weather import CITY

ASK = [{"role": "user", "content": "What does math.sqrt do?"}]
GREEDY = {"temperature": 0}
UNDER_ACCOUNT = f"/client/v4/accounts/{ACCOUNT}/ai"


@pytest.fixture(scope="module")
def expected(http) -> str:
    answer = http.post(f"/run/{CHAT}", json={"messages": ASK, **GREEDY})
    return answer.json()["result"]["response"]


@pytest.fixture(params=["", UNDER_ACCOUNT, UNDER_ACCOUNT + "/v1"], ids=["root", "account", "doubled v1"])
def claude(request, stack):
    """The client whose base URL is the root, the account's /ai, or (as Cloudflare's pages say) its /ai/v1."""
    with anthropic.Anthropic(api_key=stack.key, base_url=stack.url + request.param, max_retries=0) as client:
        yield client


def test_anthropic_messages_plain_and_streamed(claude, expected):
    asked = {"model": CHAT, "max_tokens": 64, "messages": ASK, "extra_body": GREEDY}
    plain = claude.messages.create(**asked)
    assert plain.content[0].text == expected and plain.stop_reason == "end_turn"
    assert plain._request_id
    with claude.messages.stream(**asked) as events:
        assert "".join(events.text_stream) == expected
        final = events.get_final_message()
    usage = final.usage
    assert usage.cache_read_input_tokens > 0 and usage.output_tokens == plain.usage.output_tokens
    counted = claude.messages.count_tokens(model=CHAT, messages=ASK).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_anthropic_reasons_to_stop(claude, expected):
    asked = {"model": CHAT, "messages": ASK, "extra_body": GREEDY}
    cut = claude.messages.create(max_tokens=3, **asked)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    word = expected.split()[2]
    stopped = claude.messages.create(max_tokens=64, stop_sequences=["@@@", word], **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == expected[: expected.index(word)]
    # max_tokens is required there, so clients send what suits other models: it is shortened to fit.
    assert claude.messages.create(max_tokens=20_000, **asked).stop_reason == "end_turn"


def test_anthropic_tools(claude):
    tool = {"name": "get_weather", "description": "Get the weather for a city.", "input_schema": CITY}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    asked = {"model": CHAT, "max_tokens": 80, "tools": [tool], "extra_body": GREEDY}
    first = claude.messages.create(messages=[question], **asked)
    assert first.stop_reason == "tool_use"
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "get_weather" and isinstance(call.input, dict)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    history = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=history, **asked).stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_anthropic_errors(claude, stack):
    with pytest.raises(anthropic.NotFoundError, match="No such model"):
        claude.messages.create(model="@cf/no/such", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.messages.create(model=CHAT, max_tokens=5, messages=[{"role": "user", "content": "word " * 6000}])
    assert caught.value.status_code == 400 and "prompt is too long" in str(caught.value)
    stranger = anthropic.Anthropic(api_key="wrong-key-wrong-key", base_url=stack.url, max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=CHAT, max_tokens=5, messages=ASK)


@pytest.fixture(params=["/v1", UNDER_ACCOUNT + "/v1"])
def openai(request, stack):
    with OpenAI(api_key=stack.key, base_url=stack.url + request.param, max_retries=0) as client:
        yield client


def test_responses_plain_streamed_and_continued(openai, expected):
    asked = {"model": CHAT, "input": ASK[0]["content"], **GREEDY}
    plain = openai.responses.create(**asked)
    assert plain.output_text == expected and plain.status == "completed"
    with openai.responses.stream(**asked) as events:
        list(events)
        assert events.get_final_response().output_text == expected
    following = openai.responses.create(model=CHAT, input="And math.cos?", previous_response_id=plain.id, **GREEDY)
    history = [*ASK, {"role": "assistant", "content": expected}, {"role": "user", "content": "And math.cos?"}]
    same = openai.chat.completions.create(model=CHAT, messages=history, **GREEDY)
    assert following.output_text == same.choices[0].message.content
    assert following.usage.input_tokens == same.usage.prompt_tokens
    counted = openai.responses.input_tokens.count(model=CHAT, input="And math.cos?", previous_response_id=plain.id)
    assert counted.input_tokens == following.usage.input_tokens
    assert openai.responses.retrieve(following.id).output_text == following.output_text
    asked_for = [item.content[0].text for item in openai.responses.input_items.list(following.id, order="asc")]
    assert asked_for == [message["content"] for message in history]


def test_conversations(openai):
    """What is said in a conversation is what a chain of responses would have said."""
    made = openai.conversations.create(metadata={"a": "b"})
    asked = {"model": CHAT, **GREEDY}
    first = openai.responses.create(input=ASK[0]["content"], conversation=made.id, **asked)
    second = openai.responses.create(input="And math.cos?", conversation=made.id, **asked)
    chained = openai.responses.create(input="And math.cos?", previous_response_id=first.id, **asked)
    assert (second.output_text, second.usage.input_tokens) == (chained.output_text, chained.usage.input_tokens)
    assert second.usage.input_tokens > first.usage.total_tokens
    said = [item.content[0].text for item in openai.conversations.items.list(made.id, order="asc")]
    assert said == [ASK[0]["content"], first.output_text, "And math.cos?", second.output_text]
    assert openai.conversations.delete(made.id).deleted


def test_responses_that_are_gone_or_were_never_kept(openai):
    asked = {"model": CHAT, "input": "hi", "max_output_tokens": 4}
    unkept = openai.responses.create(store=False, **asked)
    assert unkept.status in ("incomplete", "completed")
    with pytest.raises(NotFoundError):
        openai.responses.retrieve(unkept.id)
    with pytest.raises(BadRequestError, match="previous_response_id"):
        openai.responses.create(previous_response_id=unkept.id, **asked)
    kept = openai.responses.create(**asked)
    openai.responses.delete(kept.id)
    with pytest.raises(NotFoundError):
        openai.responses.delete(kept.id)


def test_responses_tools(openai):
    tool = {
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather for a city.",
        "parameters": CITY,
    }
    asked = {"model": CHAT, "tools": [tool], **GREEDY}
    first = openai.responses.create(input="What is the weather in Paris?", **asked)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather" and isinstance(json.loads(call.arguments), dict)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    after = openai.responses.create(input=[result], previous_response_id=first.id, **asked)
    assert after.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("path", ["/{0}", "/run/{0}", "/{1}", "/run/{1}"])
def test_paths_of_the_gateway_host(stack, expected, path):
    url = f"{stack.url}/v1/{ACCOUNT}/my-gateway/workers-ai" + path.format(CHAT, CHAT.replace("/", "%2F"))
    body = {"messages": ASK, **GREEDY}
    # Clients of that host carry two keys; the provider's may be anything.
    keys = {"cf-aig-authorization": f"Bearer {stack.key}", "Authorization": "Bearer someone-elses"}
    answer = httpx.post(url, json=body, headers=keys, timeout=120)
    assert answer.status_code == 200 and answer.json()["result"]["response"] == expected
    other = httpx.post(url.replace(f"/{ACCOUNT}/", "/other/"), json=body, headers=stack.headers, timeout=120)
    assert other.status_code == 403


@pytest.mark.parametrize(("path", "model"), [("workers-ai/v1", CHAT), ("compat", f"workers-ai/{CHAT}")])
def test_openai_clients_on_the_gateway_host(stack, expected, path, model):
    client = OpenAI(api_key=stack.key, base_url=f"{stack.url}/v1/{ACCOUNT}/my-gateway/{path}", max_retries=0)
    answer = client.chat.completions.create(model=model, messages=ASK, **GREEDY)
    assert answer.choices[0].message.content == expected


def test_authors_and_tasks(http):
    assert {"pico"} <= {author["name"] for author in http.get("/authors/search").json()["result"]}
    tasks = http.get("/tasks/search").json()
    assert {"Text Generation", "Text Embeddings"} <= {task["name"] for task in tasks["result"]}
    assert http.get("/tasks/search", params={"page": 2}).json()["result"] == []
    assert [t["name"] for t in http.get("/tasks/search", params={"search": "generation"}).json()["result"]] == [
        "Text Generation"
    ]


def test_the_description_is_open_and_its_examples_work(stack):
    page = httpx.get(f"{stack.url}/docs", timeout=120)
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text
    described = httpx.get(f"{stack.url}/openapi.json", timeout=120).json()
    begun = httpx.post(f"{stack.url}/v1/conversations", json={}, headers=stack.headers, timeout=120).json()["id"]
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": CHAT, "messages": ASK}}
    upload = {"files": {"file": ("in.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    file = httpx.post(f"{stack.url}/v1/files", **upload, headers=stack.headers, timeout=120).json()["id"]
    tried = 0
    for path, methods in described["paths"].items():
        for about in methods.values():
            example = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            # What manages accounts and what is theirs is tried where there are some to change.
            if example is None or about["tags"][0] in ("Accounts", "Queues", "Webhooks", "Fine-tunes"):
                continue
            # And what changes the stack that other tests have, or asks for a model that has to be fetched.
            if path.endswith(("/ai/models/actions", "/ai/prompt-log", "/audio/speech", "/images/generations")):
                continue
            url = stack.url + path.replace("{account}", ACCOUNT).replace("{gateway}", "g").replace("{model}", CHAT)
            url = url.replace("{conversation_id}", begun)
            example |= {"input_file_id": file} if "input_file_id" in example else {}
            example |= {"key": stack.key} if path == "/dashboard/session" else {}
            model = {"model": CHAT} if path.endswith("/ai/batches") else None
            answer = httpx.post(url, json=example, params=model, headers=stack.headers, timeout=120)
            assert answer.status_code == 200, (path, answer.text)
            tried += 1
    assert tried > 20


def test_every_answer_has_an_id_and_says_which_methods_there_are(stack):
    for method, path, status in [
        ("GET", "/health", 200),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/", 401),
        ("PUT", "/v1/responses/x", 405),
        ("POST", "/v1/messages", 401),
    ]:
        answer = httpx.request(method, stack.url + path)
        assert answer.status_code == status, path
        assert len(answer.headers["cf-ray"]) == 32 and answer.headers["request-id"] == answer.headers["cf-ray"]
    assert httpx.put(f"{stack.url}/v1/responses/x", timeout=120).headers["allow"] == "DELETE, GET, HEAD"


NESTED = b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}"
RAW = [
    b"", b" ", b"{", b"[1]", b'"x"', b"null", b"5", b"\xff\xfe", b'{"model": "\xff"}', b'{"a": NaN}', b'{"a": 1e400}',
    b"{}", b'{"model": 5}', b'{"model": null}', b'{"model": ""}', b'{"model": "@cf/no/such"}', b'{"model": "\\ud800"}',
    b'{"model": "../../etc/passwd"}', b'{"model": {"$ne": 1}}', b'{"prompt": 7}', b'{"messages": "hi"}',
    b'{"messages": []}', b'{"messages": [5]}', b'{"messages": [{}]}', b'{"input": 5}', b'{"input": []}', b'{"text": 5}',
    b'{"contexts": 5}', NESTED, b'{"prompt": "' + b"x" * 1_500_000 + b'"}',
]  # fmt: skip
NO_CONVERSATION = [*RAW[:11], NESTED, b'{"items": 5}', b'{"items": [5]}', b'{"metadata": 5}', b'{"metadata": [5]}']
# Right in every dialect that takes it but for these fields, each under all of its names.
TOOL = {"type": "function", "name": "f", "parameters": {}, "input_schema": {}}
FIELDS: list[dict] = [
    *({"temperature": value} for value in ("x", "0.5", -1, 99, True, [], {})),
    *({"top_p": value} for value in ("x", -1, 3, False, [0.5])),
    *({name: value for name in ("max_tokens", "max_output_tokens")} for value in ("5", True, -1, 1.5, [], 10**30)),
    *({name: value for name in ("stop", "stop_sequences", "include")} for value in (5, {}, [5])),
    *({"tools": value} for value in ("x", {}, [5], [{}], [{**TOOL, "name": 5}], [{**TOOL, "name": "no spaces"}])),
    {"tools": [{**TOOL, "type": "web_search"}]},
    {"tools": [TOOL] * 500},
    *({"tool_choice": value} for value in (5, "some", [], {"type": "some"}, {"type": 5})),
    {"model": CHAT, "messages": [{"role": "wizard", "content": "x"}], "input": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user", "content": 5}], "input": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "input": [{"type": "image_url"}]},
    {"messages": ASK * 5000, "input": ASK * 5000},
]  # fmt: skip
GOOD = {"model": CHAT, "messages": ASK, "input": "hi", "max_tokens": 5}
BODIES = [*RAW, *(json.dumps({**GOOD, **fields}).encode() for fields in FIELDS)]


def _post_paths() -> dict[str, list[bytes]]:
    """Every POST route, those with a model in the path once per task, and the bodies that it has to refuse: all of
    them once for each operation, FIELDS where they are read. Its other paths show that they lead there.
    """
    from serve_app.gateway.http.app import endpoints

    paths, seen = {}, set()
    for endpoint in endpoints(None):  # type: ignore[arg-type]
        path = endpoint.path.replace("{account}", ACCOUNT).replace("{gateway}", "g")
        if endpoint.method == "POST":
            for model in (CHAT, EMBED, RERANK) if "{model:path}" in path else (CHAT,):
                # Ollama has its own names for what FIELDS get wrong.
                generates = endpoint.about.streams or path.endswith(("/count_tokens", "/input_tokens", "/compact"))
                # A conversation may be begun with nothing.
                raw = NO_CONVERSATION if path.endswith("/conversations") else RAW
                bodies = BODIES if generates and model == CHAT and not path.startswith("/api/") else raw
                operation = (id(endpoint.about), model)
                paths[path.replace("{model:path}", model)] = raw[::4] if operation in seen else bodies
                seen.add(operation)
    return paths


def test_every_post_route_refuses_bad_bodies_while_others_stream_on(stack, expected):
    assert len(BODIES) > 60 and len(_post_paths()) > 30
    over = threading.Event()

    def other_client() -> list[str]:
        client = OpenAI(api_key=stack.key, base_url=f"{stack.url}/v1", max_retries=0)
        answers = []
        while not over.wait(0.3):
            chunks = client.chat.completions.create(model=CHAT, messages=ASK, stream=True, **GREEDY)
            answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
        return answers

    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=stack.url, headers=stack.headers, timeout=120) as client:
        streams = pool.submit(other_client)
        try:
            # Every third body of a route: another third of the next one.
            for number, (path, bodies) in enumerate(_post_paths().items()):
                for body in bodies[number % 3 :: 3]:
                    answer = client.post(path, content=body)
                    where = (path, body[:60], body[-60:], answer.text[:300])
                    assert 400 <= answer.status_code < 500, where
                    # Of what is not there, or not for this account, whatever the body.
                    absent = (7003, 3037) if "{" in path else ()
                    absent += (10000,) if path == PASS else ()
                    assert answer.json()["errors"][0]["code"] in (3003, 3006, 3042, 5006, 5007, 5021, *absent), where
                    assert len(answer.text) < 4000 and "Traceback" not in answer.text, where
        finally:
            over.set()
        assert set(streams.result()) == {expected}
    assert stack.health()[0] == 200


def test_large_headers_are_refused(stack):
    answer = httpx.get(
        f"{stack.url}/v1/models", headers={**stack.headers, **{f"x-{i}": "v" * 4000 for i in range(5)}}, timeout=120
    )
    assert answer.status_code in (400, 431)
