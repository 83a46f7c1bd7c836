"""Rerankers' dialects through the HTTP application, on the real model in this process."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.wire.encode import EncodeCall
from serve_app.worker.encoder_work import EncoderWork
from serve_app.worker.spec import WorkerSpec
from tests.tasks.conftest import ACCOUNT

RERANK = "@cf/pico/pico-reranker"
QUERY = "How do I compute a square root?"
DOCUMENTS = ["Close a file.", "Return the square root of x.", "Sort a list."]
ASK = {"model": RERANK, "query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def work() -> EncoderWork:
    weights = {"path": "checkpoints/pico-reranker"}
    spec = WorkerSpec(RERANK, "reranker", weights, str(PROJECT_ROOT / "x.yaml"), str(PROJECT_ROOT), cpu_threads=1)
    return EncoderWork(spec, lambda stage: None)


@pytest.fixture
async def served(serve: Any, work: EncoderWork) -> AsyncIterator[Any]:
    async def call(model: Any, method: Any, asked: EncodeCall) -> Any:
        return await work.encode(asked)

    async with serve(call, models=(RERANK, "@cf/pico/pico-instruct")) as served:
        yield served


@pytest.fixture
async def native(served: Any) -> list[float]:
    """The native answer's scores, in the order of the documents."""
    body = {"query": QUERY, "contexts": [{"text": text} for text in DOCUMENTS]}
    answer = (await served.http.post(f"{ACCOUNT}/run/{RERANK}", json=body)).json()["result"]["response"]
    return [item["score"] for item in sorted(answer, key=lambda item: item["id"])]


@pytest.mark.parametrize(
    ("path", "version", "repeats"),
    [
        ("/v1/rerank", "1", True),
        ("/v2/rerank", "2", False),
        ("/rerank", "1", True),
        (f"{ACCOUNT}/v1/rerank", "1", True),
        (f"{ACCOUNT}/v2/rerank", "2", False),
    ],
)
async def test_cohere_jina_and_vllm(served, native, path, version, repeats) -> None:
    answer = await served.http.post(path, json=ASK)
    body = answer.json()
    assert answer.status_code == 200, body
    best = sorted(range(3), key=lambda i: -native[i])
    assert [item["index"] for item in body["results"]] == best and best[0] == 1
    assert [item["relevance_score"] for item in body["results"]] == [native[i] for i in best]
    shown = [item.get("document") for item in body["results"]]
    assert shown == ([{"text": DOCUMENTS[i]} for i in best] if repeats else [None] * 3)
    assert body["id"] and body["model"] == RERANK and body["usage"]["total_tokens"] > 20
    assert body["meta"]["api_version"] == {"version": version} and body["meta"]["billed_units"]["search_units"] == 1


async def test_what_may_be_asked_of_it(served, native) -> None:
    async def post(**fields: Any) -> list[dict[str, Any]]:
        answer = await served.http.post("/v2/rerank", json={**ASK, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    assert [item["index"] for item in await post(top_n=1)] == [1]
    assert len(await post(top_n=0)) == 3 and (await post(return_documents=True))[0]["document"]["text"] == DOCUMENTS[1]
    objects = [{"text": text, "title": "x"} for text in DOCUMENTS]
    assert await post(documents=objects) == await post()
    assert await post(documents=objects, rank_fields=["title", "text"]) != await post()
    raw = {item["index"]: item["relevance_score"] for item in await post(use_activation=False)}
    assert [1 / (1 + math.exp(-raw[i])) for i in range(3)] == pytest.approx(native, abs=1e-6)
    # The only reranker here need not be named.
    assert (await served.http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS})).status_code == 200


async def test_tei(served, native) -> None:
    answer = await served.http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True})
    best = sorted(range(3), key=lambda i: -native[i])
    assert answer.json() == [{"index": i, "score": native[i], "text": DOCUMENTS[i]} for i in best]
    raw = (await served.http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True})).json()
    assert {item["index"]: 1 / (1 + math.exp(-item["score"])) for item in raw} == pytest.approx(
        dict(enumerate(native)), abs=1e-6
    )


async def test_long_documents_are_cut_and_teis_texts_only_when_asked(served) -> None:
    long = "a long line about files " * 400
    cut = await served.http.post("/v1/rerank", json={**ASK, "documents": [long, DOCUMENTS[1]]})
    assert cut.status_code == 200 and cut.json()["usage"]["total_tokens"] < 600
    fewer = await served.http.post("/v1/rerank", json={**ASK, "documents": [long], "max_tokens_per_doc": 9})
    assert fewer.json()["usage"]["total_tokens"] < 30
    for body, status in (
        ({}, 400),
        ({"truncate": True}, 200),
        ({"truncate": True, "truncation_direction": "Left"}, 200),
    ):
        answer = await served.http.post("/rerank", json={"query": QUERY, "texts": [long], **body})
        assert answer.status_code == status, answer.text
    assert (
        await served.http.post("/v1/rerank", json={**ASK, "documents": [long], "truncate": False})
    ).status_code == 400


@pytest.mark.parametrize("path", ["/score", "/v1/score", f"{ACCOUNT}/v1/score"])
async def test_scores_of_pairs(served, native, path) -> None:
    async def post(**fields: Any) -> Any:
        return (await served.http.post(path, json={"model": RERANK, **fields})).json()

    answer = await post(text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in answer["data"]] == native and answer["object"] == "list"
    assert [item["index"] for item in answer["data"]] == [0, 1, 2] and answer["data"][0]["object"] == "score"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    each = await post(queries=[QUERY, "x", QUERY], documents=DOCUMENTS)
    assert [each["data"][i]["score"] for i in (0, 2)] == [native[0], native[2]]
    assert (await post(data_1=QUERY, data_2=DOCUMENTS[1]))["data"][0]["score"] == pytest.approx(native[1], abs=1e-6)
    assert "as many as" in (await post(text_1=["a", "b"], text_2=DOCUMENTS))["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/rerank", {}, "query is missing"),
        ("/v1/rerank", {"query": "q"}, "documents is missing"),
        ("/v1/rerank", {"query": "q", "documents": []}, "at least one"),
        ("/v1/rerank", {"query": "q", "documents": "d"}, "must be an array"),
        ("/v1/rerank", {"query": "q", "documents": [1]}, r"documents[0]"),
        ("/v1/rerank", {"query": "q", "documents": [{"image": "x"}]}, r"documents[0].text"),
        ("/v1/rerank", {"query": 1, "documents": ["d"]}, "query must be a string"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "top_n": "3"}, "quotes"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "return_documents": "yes"}, "return_documents"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "max_chunks_per_doc": 5}, "max_chunks_per_doc"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v2/rerank", {"query": "q", "documents": ["d"], "relevant_spans": {"mode": "enabled"}}, "relevant_spans"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "truncate": "MIDDLE"}, "truncate must be"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "model": "@cf/pico/pico-instruct"}, "No such model"),
        ("/rerank", {"query": "q", "texts": []}, "texts must not be an empty array"),
        ("/rerank", {"query": "q", "texts": ["d"], "raw_scores": 1}, "raw_scores"),
        ("/score", {"text_1": "q"}, "Two sides are missing"),
        ("/score", {"text_1": [], "text_2": "d"}, "text_1 must not be an empty array"),
        ("/score", {"text_1": "q", "text_2": {"content": []}}, "text_2"),
        ("/score", {"text_1": "q", "text_2": "d", "truncate_prompt_tokens": 2}, "No text would be left"),
    ],
)
async def test_what_is_wrong_is_said(served, path, body, words) -> None:
    answer = await served.http.post(path, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    told = answer.json()
    assert words in told["message"] and told["detail"] == told["message"] == told["error"]["message"]
