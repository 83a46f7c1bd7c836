"""What vLLM, Cohere, Jina and Text Embeddings Inference add: tokens, scores of prompts, rerankers."""

from __future__ import annotations

from typing import Any

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.shapes import NUMBER, any_of, filled, length, problem

QUERY = "How do I compute a square root?"
DOCUMENTS = ["Close a file.", "Return the square root of x.", "Sort a list."]


def cases(models: Models) -> list[Case]:
    return [*_tokens(models), *_prompts(models), *_ranks(models)]


def _tokens(models: Models) -> list[Case]:
    def post(name: str, path: str, body: dict[str, Any], shape: Any, status: int = 200) -> Case:
        return Case("vllm", name, "POST", path, {"model": models.chat, **body}, status, shape)

    tokens = {"count": int, "max_model_len": any_of(int, None), "tokens": filled(int)}
    ask = [{"role": "user", "content": "hi"}]
    return [
        post("the tokens of a text", "/tokenize", {"prompt": "import os"}, tokens),
        post("the tokens of a chat", "/tokenize", {"messages": ask}, tokens),
        post("tokens by name", "/tokenize", {"prompt": "a b", "return_token_strs": True}, {"token_strs": filled(str)}),
        post("the text of tokens", "/detokenize", {"tokens": [5, 6]}, {"prompt": str}),
        post("neither text nor chat", "/tokenize", {}, {"error": {"message": filled(str)}}, 400),
        Case("vllm", "a tokenizer", "GET", "/tokenizer_info", shape={"tokenizer_class": str}),
    ]


def _prompts(models: Models) -> list[Case]:
    body = {"model": models.chat, "prompt": "import os\n", "max_tokens": 1, "temperature": 0}
    ids = {"prompt_token_ids": filled(int), "token_ids": filled(int)}
    return [
        Case("vllm", "log-probabilities of a prompt", "POST", "/v1/completions", {**body, "prompt_logprobs": 1},
             shape={"choices": filled({"prompt_logprobs": _told})}),
        Case("vllm", "token ids", "POST", "/v1/completions", {**body, "return_token_ids": True},
             shape={"choices": filled(ids)}),
    ]  # fmt: skip


def _ranks(models: Models) -> list[Case]:
    def post(
        api: str, name: str, path: str, body: dict[str, Any], shape: Any, status: int = 200, ours: str = ""
    ) -> Case:
        return Case(api, name, "POST", path, {"model": models.rerank, **body}, status, shape, needs="rerank", ours=ours)

    ask = {"query": QUERY, "documents": DOCUMENTS}
    result = {"index": int, "relevance_score": NUMBER}
    shown = {**result, "document": {"text": str}}
    meta = {"api_version": {"version": str}, "billed_units": {"search_units": NUMBER}}
    usage = {"total_tokens": int}
    rank = {"index": int, "score": NUMBER}
    pair = {"index": int, "object": "score", "score": NUMBER}
    scores = {"id": str, "object": "list", "created": int, "model": str, "data": length(3, pair), "usage": usage}
    return [
        post("cohere", "version 2", "/v2/rerank", ask, {"id": str, "results": _descending(3, result), "meta": meta}),
        post("cohere", "top_n", "/v2/rerank", {**ask, "top_n": 1}, {"results": length(1, result)}),
        post("cohere", "version 1 with documents", "/v1/rerank", {**ask, "return_documents": True},
             {"results": _descending(3, shown), "meta": meta}),
        post("cohere", "no documents", "/v2/rerank", {"query": QUERY, "documents": []}, {"message": filled(str)}, 400),
        post("jina", "ranks", "/v1/rerank", ask, {"model": str, "usage": usage, "results": _descending(3, result)}),
        post("jina", "no query", "/v1/rerank", {"documents": DOCUMENTS}, {"detail": any_of(str, list, dict)}, 422,
             ours="what is wrong with a body is 400 in every dialect"),
        post("vllm", "ranks", "/rerank", ask, {"id": str, "model": str, "usage": usage, "results": length(3, shown)}),
        post("vllm", "scores", "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}, scores),
        post("vllm", "scores one by one", "/score", {"text_1": [QUERY] * 3, "text_2": DOCUMENTS}, scores),
        post("tei", "ranks", "/rerank", {"query": QUERY, "texts": DOCUMENTS}, _descending(3, rank)),
        post("tei", "ranks with texts", "/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True},
             _descending(3, {**rank, "text": str})),
        post("tei", "no texts", "/rerank", {"query": QUERY, "texts": []}, {"error": str}, (400, 422),
             ours="error is an object, as with OpenAI, whose route this is as well"),
    ]  # fmt: skip


def _told(value: Any) -> str | None:
    if not isinstance(value, list) or value[:1] != [None] or len(value) < 2:
        return "does not begin with null"
    shape = {"logprob": NUMBER, "rank": int, "decoded_token": str}
    return next((p for item in value[1:] for one in item.values() if (p := problem(one, shape))), None)


def _descending(count: int, shape: Any) -> Any:
    def check(value: Any) -> str | None:
        if told := length(count, shape)(value):
            return told
        scores = [item.get("score", item.get("relevance_score")) for item in value]
        return None if scores == sorted(scores, reverse=True) else "is not best first"

    return check
