"""Listing models: filters, paging, the three shapes, and schemas that agree with the readers."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest
from cloudflare import Cloudflare
from openai.types import Model

from serve_app.api import listing as models
from serve_app.api.errors import InvalidInput, NotFound
from serve_app.api.types import ChoiceDone, TextDelta, ToolCallDelta, Usage
from serve_app.catalog.tasks import declared
from serve_app.tasks.registry import tasks
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.tasks.text_generation.write import render_generate
from serve_app.tasks.translation.task import parse_translate


def record(number: int, task: str = "Text Generation", **properties: Any) -> dict[str, Any]:
    if task == "Text Generation":
        properties["interface"] = "chat"
    return {
        "id": str(number),
        "source": 1,
        "name": f"@cf/{'pico' if number % 2 else 'meta'}/model-{number}",
        "description": f"Number {number}",
        "task": {"id": f"id of {task}", "name": task, "description": ""},
        "created_at": "2024-12-06 17:09:18.338",
        "tags": [],
        "properties": [{"property_id": key, "value": value} for key, value in properties.items()],
    }


PRICE = [{"unit": "per M input tokens", "price": 0.27, "currency": "USD"}]
RECORDS = [
    *(record(i) for i in range(5)),
    record(5, "Text Embeddings", beta="true"),
    record(6, context_window="24000", price=PRICE),
    record(7, planned_deprecation_date="2020-01-01"),
]


def names(**query: str) -> list[str]:
    return [item["name"].rsplit("-", 1)[1] for item in models.search(RECORDS, query)["result"]]


def test_filters():
    assert names() == ["0", "1", "2", "3", "4", "5", "6"]
    assert names(include_deprecated="true")[-1] == "7"
    assert names(task="Text Embeddings") == ["5"] == names(task="id of Text Embeddings")
    assert names(author="pico") == ["1", "3", "5"]
    assert names(search="NUMBER 3") == ["3"]
    assert names(source="2") == []
    assert "5" not in names(hide_experimental="true")


def test_paging():
    body = models.search(RECORDS, {"page": "2", "per_page": "3"})
    assert [item["id"] for item in body["result"]] == ["3", "4", "5"]
    assert body["result_info"] == {"page": 2, "per_page": 3, "count": 3, "total_count": 7}
    assert models.search(RECORDS, {"page": "99"})["result"] == []


@pytest.mark.parametrize("page", ["0", "-1", "x", "1.5", "٣", "9" * 20])
def test_pages_that_are_none(page):
    with pytest.raises(InvalidInput):
        models.search(RECORDS, {"page": page})


def test_the_cloudflare_client_reads_all_pages_and_ends():
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=models.search(RECORDS, dict(request.url.params)))

    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        sdk = Cloudflare(api_token="t", base_url="http://localhost/client/v4", http_client=http)
        assert len(list(sdk.ai.models.list(account_id="local", per_page=3))) == 7


def test_openai_and_openrouter():
    listed = models.openai_models(RECORDS)
    names = [Model.model_validate(item, strict=True).id for item in listed["data"]]
    # Those that chat come first, as clients that ask nobody take the first one.
    chats = [r["name"] for r in RECORDS if r["task"]["name"] == "Text Generation"]
    assert names == chats + [r["name"] for r in RECORDS if r["name"] not in chats]
    backwards = models.openai_models(RECORDS[::-1])["data"]
    assert {item["id"] for item in backwards[: len(chats)]} == set(chats)
    assert models.openai_model(RECORDS, "@cf/meta/model-6")["owned_by"] == "meta"
    assert models.openai_model(RECORDS, "@cf/meta/model-6")["max_model_len"] == 24000
    with pytest.raises(NotFound) as caught:
        models.openai_model(RECORDS, "nope")
    assert caught.value.status == 404
    router = models.search(RECORDS, {"format": "openrouter"})["data"]
    found = next(item for item in router if item["id"] == "@cf/meta/model-6")
    assert found["context_length"] == 24000 and found["pricing"]["prompt"] == "0.00000027"
    assert found["pricing"]["completion"] == "0"


INPUTS = [
    ("text-generation", {"prompt": "x", "temperature": 5, "n": 16, "stop": "a"}, True),
    ("text-generation", {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}, True),
    ("text-generation", {"prompt": ""}, False),
    ("text-generation", {"prompt": "x", "temperature": 6}, False),
    ("text-generation", {"prompt": "x", "max_tokens": 0}, False),
    ("text-generation", {"prompt": "x", "n": 129}, False),
    ("text-generation", {"prompt": "x", "stop": ["a"] * 17}, False),
    ("text-generation", {"messages": []}, False),
    ("text-embeddings", {"text": ["a"]}, True),
    ("text-embeddings", {"query": "q", "contexts": [{"text": "a"}]}, True),
    ("text-embeddings", {"text": []}, False),
    ("text-embeddings", {}, False),
    ("reranking", {"query": "q", "contexts": [{"text": "a"}], "top_k": 1}, True),
    ("reranking", {"query": "q", "contexts": []}, False),
    ("translation", {"text": "a", "target_lang": "fr"}, True),
    ("translation", {"text": ["a", "b"], "target_language": "fr"}, True),
    ("translation", {"text": "a"}, False),
    ("translation", {"text": "a", "target_lang": "f" * 33}, False),
]
PARSE = {
    "text-generation": parse_generate,
    "text-embeddings": parse_embed,
    "reranking": parse_rerank,
    "translation": lambda inputs, model: parse_translate(inputs),
}


@pytest.mark.parametrize(("task", "inputs", "right"), INPUTS)
def test_schemas_say_what_the_readers_do(task, inputs, right):
    found = tasks()[task].schema()
    jsonschema.Draft202012Validator.check_schema(found["input"])
    jsonschema.Draft202012Validator.check_schema(found["output"])
    assert jsonschema.Draft202012Validator(found["input"]).is_valid(inputs) == right
    if right:
        PARSE[task](inputs, "m")
    else:
        with pytest.raises(InvalidInput):
            PARSE[task](inputs, "m")


@pytest.mark.parametrize("task", declared())
def test_examples_are_what_schemas_say(task):
    validator = jsonschema.Draft202012Validator(tasks()[task].schema()["input"])
    assert validator.is_valid(dict(declared()[task].example))


def test_answers_fit_the_output_schema():
    request = parse_generate({"prompt": "x"}, "m")
    events = [
        TextDelta(0, "a"),
        ToolCallDelta(0, 0, "c", "f", "{}"),
        ChoiceDone(0, "tool_calls"),
        Usage(1, 2),
    ]
    jsonschema.validate(render_generate(request, events)["result"], tasks()["text-generation"].schema()["output"])
