"""Chat, embeddings and reranking over HTTP, by way of prefill, pool, decode and draft."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from tests.e2e.conftest import CHAT, EMBED, RERANK, eos_id
from tests.e2e.test_faults import workers

QUESTION = "What does itertools.chain do?"


def sse(answer: httpx.Response) -> list:
    frames = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def test_health_needs_no_key(stack):
    status, report = stack.health()
    assert status == 200 and report["status"] == "ready"
    assert all(model["ready"] for model in report["models"].values()) and CHAT in report["models"]


def test_question_is_answered_and_the_second_time_from_the_cache(run):
    prompt = "What does itertools.chain do?"
    first = run(CHAT, {"prompt": prompt, "temperature": 0})
    second = run(CHAT, {"prompt": prompt, "temperature": 0})
    assert second["response"] == first["response"]
    text = first["response"].lower()
    assert "iterable" in text, text
    assert first["finish_reason"] == "stop" and first["choices"][0]["message"]["content"] == first["response"]
    usage = second["usage"]
    # All but the last prompt token, whose logits are needed.
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["neurons"] < first["usage"]["neurons"] or first["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_cold_prompt_is_prefilled_elsewhere_and_reports_nothing_cached(run, stack):
    before = workers(stack)
    words = " ".join(f"word{i}" for i in range(120))
    result = run(CHAT, {"prompt": f"Cold prompt: {words}", "max_tokens": 4})
    after = workers(stack)
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    computed = result["usage"]["prompt_tokens"] - 1
    assert after["prefill"]["prompt_tokens"] - before["prefill"]["prompt_tokens"] >= computed
    assert after["prefill"]["pool_published"] > before["prefill"]["pool_published"]
    assert after["decode"]["pool_local_tokens"] - before["decode"]["pool_local_tokens"] >= computed
    # Decode computed the last prompt token and what it generated, nothing of the prompt's body.
    assert after["decode"]["prompt_tokens"] - before["decode"]["prompt_tokens"] < computed


def test_greedy_equals_transformers_across_the_hand_over(run):
    """The served model against ``generate`` on the same weights: prefill, pool, decode and draft change nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from serve_app.catalog.load import PROJECT_ROOT

    folder = PROJECT_ROOT / "checkpoints" / "pico-instruct"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = ["What does os.path.join do?", "What is collections.deque?", "How do I use functools.lru_cache? " * 20]
    for question in questions:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=48, do_sample=False)
        expected = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        for _ in range(2):
            result = run(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 48})
            assert result["response"] == expected
            assert result["usage"]["prompt_tokens"] == ids["input_ids"].shape[1]


def test_native_stream(http):
    body = {"prompt": QUESTION, "temperature": 0}
    whole = http.post(f"/run/{CHAT}", json=body).json()["result"]
    with http.stream("POST", f"/run/{CHAT}", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = sse(answer)
    assert "".join(f["response"] for f in frames) == whole["response"]
    last = frames[-1]
    assert last["response"] == "" and last["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all("usage" not in f for f in frames[:-1])


def test_seed_fixes_a_sampled_answer(run):
    body = {"prompt": "Tell me about Python.", "temperature": 1.0, "seed": 7, "max_tokens": 30}
    assert run(CHAT, body)["response"] == run(CHAT, body)["response"]
    others = {run(CHAT, {**body, "seed": seed})["response"] for seed in range(8, 12)}
    assert len(others) > 1


def test_stop_string_n_and_logprobs(stack, run):
    whole = run(CHAT, {"prompt": QUESTION, "temperature": 0})["response"]
    word = whole.split()[3]
    stopped = run(CHAT, {"prompt": QUESTION, "temperature": 0, "stop": word})
    assert stopped["response"] == whole[: whole.index(word)] and stopped["finish_reason"] == "stop"

    body = {
        "model": CHAT, "messages": [{"role": "user", "content": QUESTION}],
        "n": 3, "temperature": 1.2, "max_tokens": 8, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=60).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        tokens = choice["logprobs"]["content"]
        assert tokens and all(len(t["top_logprobs"]) == 2 and t["logprob"] <= 0 for t in tokens)
    assert answer["usage"]["completion_tokens"] == sum(len(c["logprobs"]["content"]) for c in answer["choices"])


def test_embeddings(run):
    result = run(EMBED, {"text": ["a cat sat on the mat", "a kitten is on the rug", "stock prices fell"]})
    assert result["shape"] == [3, 384]
    vectors = np.array(result["data"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
    assert np.allclose(run(EMBED, {"text": "stock prices fell"})["data"][0], vectors[2], atol=1e-5)


def test_many_embeddings_in_one_call(run):
    texts = [f"sentence number {i}" for i in range(600)]
    result = run(EMBED, {"text": texts})
    assert result["shape"] == [600, 384]
    assert np.allclose(run(EMBED, {"text": texts[321]})["data"][0], result["data"][321], atol=1e-5)


def test_reranking(run):
    contexts = [
        {"text": "Return the largest item in an iterable."},
        {"text": "Return the square root of x."},
        {"text": "Close the file descriptor fd."},
    ]
    result = run(RERANK, {"query": "How do I compute a square root?", "contexts": contexts})
    assert [set(r) for r in result["response"]] == [{"id", "score"}] * 3
    scores = [r["score"] for r in result["response"]]
    assert scores == sorted(scores, reverse=True) and all(0 <= s <= 1 for s in scores)
    assert result["response"][0]["id"] == 1
    assert len(run(RERANK, {"query": "q", "contexts": contexts, "top_k": 2})["response"]) == 2


def test_model_id_raw_and_percent_encoded_and_in_the_body(http):
    body = {"text": "hello"}
    raw = http.post(f"/run/{EMBED}", json=body).json()
    encoded = http.post("/run/" + EMBED.replace("/", "%2F"), json=body).json()
    named = http.post("/run", json={"model": EMBED, "input": body}).json()
    unlabelled = http.post(f"/run/{EMBED}", content=json.dumps(body)).json()
    assert raw["result"]["data"] == encoded["result"]["data"] == named["result"]["data"] == unlabelled["result"]["data"]


def test_models_search_pages_and_schema(http):
    everything = http.get("/models/search").json()
    names = [m["name"] for m in everything["result"]]
    assert {CHAT, EMBED, RERANK} <= set(names) and everything["result_info"]["total_count"] == len(names)
    paged: list[str] = []
    page = 1
    while found := http.get("/models/search", params={"page": page, "per_page": 2}).json()["result"]:
        paged += [m["name"] for m in found]
        page += 1
    assert paged == names and page == -(-len(names) // 2) + 1
    schema = http.get("/models/schema", params={"model": CHAT}).json()["result"]
    assert set(schema) == {"input", "output"}


@pytest.mark.parametrize("path", ["/v1/models", "/client/v4/accounts/local/ai/v1/models"])
def test_openai_model_list(stack, path):
    listed = httpx.get(stack.url + path, headers=stack.headers, timeout=120).json()
    assert listed["object"] == "list" and CHAT in [m["id"] for m in listed["data"]]


def test_tokens_arrive_while_the_engine_is_still_at_work(stack, http):
    """Otherwise a stream would be nothing but a slow answer in pieces."""
    body = {"prompt": "Once upon a time " * 5, "raw": True, "max_tokens": 3000, "stream": True}
    with http.stream("POST", f"/run/{CHAT}", json={**body, "logit_bias": {eos_id(): -100}}) as answer:
        frames = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert "response" in json.loads(next(frames).removeprefix("data: "))
        assert workers(stack)["decode"]["running"] >= 1
