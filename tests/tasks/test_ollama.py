"""Ollama's dialect: what its clients send and read, on a real engine worker and real encoders in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.wire.encode import EncodeCall, Encoded
from serve_app.wire.generate import GenerateCall
from tests.weather import WEATHER
from tests.worker.world import MemoryPool, start

CHAT, EMBED = "@cf/pico/pico-instruct", "@cf/sentence-transformers/all-minilm-l6-v2"
FOLDER = PROJECT_ROOT / "checkpoints" / "pico-instruct"
ASK = [{"role": "user", "content": "What does math.sqrt do?"}]


@pytest.fixture
async def http(serve: Any) -> AsyncIterator[Any]:
    work = start(FOLDER, "decode", MemoryPool(), kv_cache_bytes=16 << 20)

    async def call(model: Any, method: Any, asked: Any, stage: str = "", replica: str = "") -> Any:
        if isinstance(asked, GenerateCall):
            return await work.generate(asked)
        assert isinstance(asked, EncodeCall)
        # Each text's vector is how many tokens it has, and its first and last.
        lengths = np.frombuffer(asked.lengths, np.int32)
        parts = np.split(np.frombuffer(asked.ids, np.int32), np.cumsum(lengths)[:-1])
        rows = np.array([[len(ids), ids[0], ids[-1]] for ids in parts], np.float32)
        return Encoded(rows.shape, memoryview(rows.tobytes()))

    async with serve(call, models=(CHAT, EMBED)) as served:
        yield served.http
    await work.aclose()


def lines(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in answer.text.splitlines()]


async def test_chats_whole_and_in_lines(http) -> None:
    body = {"model": CHAT + ":latest", "messages": ASK, "options": {"temperature": 0, "num_predict": -1, "num_ctx": 99}}
    whole = (await http.post("/api/chat", json={**body, "stream": False})).json()
    assert whole["message"]["role"] == "assistant" and "square root" in whole["message"]["content"]
    assert whole["done"] is True and whole["done_reason"] == "stop" and whole["model"] == CHAT
    assert whole["eval_count"] > 3 and whole["prompt_eval_count"] > 3
    assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 0
    parts = lines(await http.post("/api/chat", json=body))
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["eval_count"] == whole["eval_count"] and parts[-1]["created_at"].endswith("Z")
    cut = (await http.post("/api/chat", json={**body, "stream": False, "options": {"num_predict": 3}})).json()
    assert cut["done_reason"] == "length" and cut["eval_count"] == 3


async def test_prompts(http) -> None:
    body = {"model": CHAT, "prompt": ASK[0]["content"], "options": {"temperature": 0}}
    chat = (await http.post("/api/chat", json={"model": CHAT, "messages": ASK, "stream": False})).json()
    whole = (await http.post("/api/generate", json={**body, "stream": False, "logprobs": True})).json()
    assert whole["response"] == chat["message"]["content"] and whole["logprobs"][0]["logprob"] <= 0
    assert "".join(part["response"] for part in lines(await http.post("/api/generate", json=body))) == whole["response"]
    raw = {
        **body,
        "raw": True,
        "prompt": "import os\n",
        "stream": False,
        "options": {"num_predict": 4, "temperature": 0},
    }
    plain = {"model": CHAT, "prompt": "import os\n", "max_tokens": 4, "temperature": 0}
    expected = (await http.post("/v1/completions", json=plain)).json()["choices"][0]["text"]
    assert (await http.post("/api/generate", json=raw)).json()["response"] == expected


async def test_tools_and_formats(http) -> None:
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    body = {"model": CHAT, "messages": ask, "tools": [WEATHER], "options": {"temperature": 0}}
    whole = (await http.post("/api/chat", json={**body, "stream": False})).json()
    [call] = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and call["function"]["arguments"] == {"city": "Paris"}
    told = [part for part in lines(await http.post("/api/chat", json=body)) if part["message"].get("tool_calls")]
    assert [part["message"]["tool_calls"][0]["function"] for part in told] == [call["function"]]
    turns = [*ask, whole["message"], {"role": "tool", "tool_name": "get_weather", "content": "sunny, 21 C"}]
    assert (await http.post("/api/chat", json={**body, "messages": turns, "stream": False})).json()["message"][
        "content"
    ]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    for form in ("json", schema):
        asked = {"model": CHAT, "messages": ASK, "format": form, "stream": False, "options": {"num_predict": 60}}
        answer = (await http.post("/api/chat", json=asked)).json()
        if answer["done_reason"] == "stop":
            assert isinstance(orjson.loads(answer["message"]["content"]), dict)


async def test_embeddings(http) -> None:
    answer = (await http.post("/api/embed", json={"model": EMBED, "input": ["one", "two words"]})).json()
    assert len(answer["embeddings"]) == 2 and answer["prompt_eval_count"] > 4
    one = (await http.post("/api/embed", json={"model": EMBED, "input": "one"})).json()["embeddings"]
    old = (await http.post("/api/embeddings", json={"model": EMBED, "prompt": "one"})).json()["embedding"]
    ids = (await http.post("/tokenize", json={"model": EMBED, "prompt": "one"})).json()["tokens"]
    plain = (await http.post("/v1/embeddings", json={"model": EMBED, "input": [ids]})).json()["data"][0]["embedding"]
    assert one == [answer["embeddings"][0]] == [old] == [plain]
    assert (await http.post("/api/embed", json={"model": EMBED, "input": []})).json()["embeddings"] == []
    long = {"model": EMBED, "input": "word " * 2000}
    assert (await http.post("/api/embed", json=long)).json()["embeddings"][0][0] == 256
    for path, body, status in (
        ("/api/embed", {**long, "truncate": False}, 400),
        ("/v1/embeddings", long, 400),
        ("/v1/embeddings", {**long, "truncate_prompt_tokens": 9}, 200),
        ("/v1/embeddings", {**long, "dimensions": 384, "truncate": "START"}, 200),
        ("/v1/embeddings", {"model": EMBED, "input": "one", "dimensions": 100}, 400),
        ("/v1/embeddings", {"model": EMBED, "input": [31000]}, 400),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == status, answer.text


async def test_models(http) -> None:
    listed = (await http.get("/api/tags")).json()["models"]
    assert {item["name"] for item in listed} == {CHAT, EMBED}
    assert all(len(item["digest"]) == 64 and item["details"]["format"] == "safetensors" for item in listed)
    assert {item["model"] for item in (await http.get("/api/ps")).json()["models"]} == {CHAT, EMBED}
    chat = (await http.post("/api/show", json={"model": CHAT})).json()
    family = chat["model_info"]["general.architecture"]
    assert chat["capabilities"] == ["completion", "tools"] and chat["model_info"][f"{family}.context_length"] == 4096
    assert "message" in chat["template"]
    assert (await http.post("/api/show", json={"name": EMBED})).json()["capabilities"] == ["embedding"]
    assert (await http.get("/api/version")).json()["version"].count(".") == 2
    loaded = (await http.post("/api/generate", json={"model": CHAT, "keep_alive": 0})).json()
    assert loaded["done_reason"] == "load" and loaded["done"] is True


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {}, 400, "model is missing"),
        ("chat", {"model": "llama3"}, 404, "No such model"),
        ("chat", {"model": CHAT, "messages": "hi"}, 400, "messages must be an array"),
        ("chat", {"model": CHAT, "messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ("chat", {"model": CHAT, "messages": [{**ASK[0], "images": ["aGk="]}]}, 400, "are not supported"),
        ("chat", {"model": CHAT, "messages": ASK, "options": {"temperature": "hot"}}, 400, "temperature"),
        ("chat", {"model": CHAT, "messages": ASK, "options": {"num_predict": 0}}, 400, "max_tokens"),
        ("chat", {"model": CHAT, "messages": ASK, "options": []}, 400, "options must be an object"),
        ("chat", {"model": CHAT, "messages": ASK, "stream": "no"}, 400, "stream"),
        ("chat", {"model": CHAT, "messages": ASK, "format": "xml"}, 400, "format"),
        ("chat", {"model": CHAT, "messages": ASK, "think": "hard"}, 400, "think"),
        ("generate", {"model": CHAT, "prompt": 5}, 400, "prompt must be a string"),
        ("generate", {"model": CHAT, "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("generate", {"model": CHAT, "prompt": "x", "context": [1, 2]}, 400, "context"),
        ("embed", {"model": EMBED}, 400, "input is missing"),
        ("embed", {"model": EMBED, "input": ["a", ""]}, 400, "empty string"),
        ("embed", {"model": CHAT, "input": "a"}, 404, "No such model"),
        ("embeddings", {"model": EMBED, "prompt": 5}, 400, "prompt"),
        ("show", {"model": "nobody"}, 404, "No such model"),
        ("nothing", {}, 404, "Could not route"),
    ],
)
async def test_what_is_wrong_is_said(serve, path, body, status, words) -> None:
    async with serve(models=(CHAT, EMBED)) as served:
        answer = await served.http.post(f"/api/{path}", json=body)
        assert answer.status_code == status and words in answer.json()["error"], answer.text
        assert answer.json()["errors"][0]["message"] == answer.json()["error"]
