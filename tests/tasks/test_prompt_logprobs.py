"""Scoring of given text over HTTP: a gateway and an engine worker in this process beside transformers, on one model.

What `lm-eval` sends (`local-completions`): prompts as token ids, ``echo``, ``logprobs: 1``, ``max_tokens: 1``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.text.tokenizer import Tokenizer
from serve_app.wire.generate import GenerateCall
from tests.worker.world import MemoryPool, start

CHAT = "@cf/pico/pico-instruct"
FOLDER = PROJECT_ROOT / "checkpoints" / "pico-instruct"
TEXTS = ["import os\nprint(os.path.join('a', 'b'))\n", "def add(a, b):\n    return a + b\n"]
TOKENIZER = Tokenizer(FOLDER)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture
async def served(serve: Any) -> AsyncIterator[Any]:
    work = start(FOLDER, "decode", MemoryPool(), kv_cache_bytes=16 << 20)

    async def call(model: Any, method: Any, asked: GenerateCall, stage: str = "", replica: str = "") -> Any:
        return await work.generate(asked)

    async with serve(call, models=(CHAT,)) as served:
        yield served
    await work.aclose()


def rows(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), -1)


def own(reference: Any, ids: list[int]) -> list[float]:
    return rows(reference, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


async def post(served: Any, **body: Any) -> dict[str, Any]:
    asked = {"model": CHAT, "temperature": 0, **body}
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    answer = await served.http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_what_lm_eval_sends(served, reference) -> None:
    """Twice, so that the second time all of it is cached."""
    prompts = [TOKENIZER.encode_prompt(text).tolist() for text in TEXTS]
    for _ in range(2):
        answer = await post(served, prompt=prompts, max_tokens=1, echo=True, logprobs=1, seed=1234)
        for choice, ids, text in zip(answer["choices"], prompts, TEXTS, strict=True):
            told = choice["logprobs"]
            assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(ids) + 1
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            np.testing.assert_allclose(told["token_logprobs"][1:-1], own(reference, ids), atol=2e-4)
            greedy = (rows(reference, ids)[:-1].argmax(-1) == torch.tensor(ids[1:])).tolist()
            pairs = zip(told["token_logprobs"][1:-1], told["top_logprobs"][1:-1], strict=True)
            assert [logprob == max(top.values()) for logprob, top in pairs] == greedy and any(greedy)
            assert choice["text"].startswith(text) and told["text_offset"][:2] == [0, len(told["tokens"][0])]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_text_prompts_nothing_generated_and_both_kinds_at_once(served, reference) -> None:
    ids = TOKENIZER.encode_prompt(TEXTS[0], add_special_tokens=True).tolist()
    body = {"prompt": TEXTS[0], "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = await post(served, **body, prompt_logprobs=2, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == TEXTS[0] and choice["finish_reason"] == "length" and choice["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], own(reference, ids), atol=2e-4)
    assert choice["prompt_token_ids"] == ids
    # vLLM's form.
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    for row, token, told in zip(rows(reference, ids), ids[1:], choice["prompt_logprobs"][1:], strict=False):
        assert told[str(token)]["rank"] == int((row > row[token]).sum()) + 1
        assert told[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        assert told[str(token)]["decoded_token"] == TOKENIZER.token_text(token)
        assert {int(i) for i in told} == {token, *row.topk(2).indices.tolist()}


async def test_chats_tell_of_the_prompt_that_their_template_makes(served, reference) -> None:
    ask = {"messages": [{"role": "user", "content": "What does math.sqrt do?"}], "max_tokens": 4}
    answer = await post(served, **ask, prompt_logprobs=0, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    told = [next(iter(item.values()))["logprob"] for item in answer["prompt_logprobs"][1:]]
    np.testing.assert_allclose(told, own(reference, ids), atol=2e-4)
    [choice] = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 4
    assert TOKENIZER.decode(choice["token_ids"]) == choice["message"]["content"]
    # Those ids lead on to where the answer went.
    again = await post(served, prompt=ids, max_tokens=4)
    assert again["choices"][0]["text"] == choice["message"]["content"]
    assert "prompt_logprobs" not in again and "token_ids" not in again["choices"][0]


async def test_a_stream_begins_with_the_prompt(served, reference) -> None:
    ids = TOKENIZER.encode_prompt(TEXTS[1]).tolist()
    body = {"model": CHAT, "prompt": ids, "max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0}
    whole = (await post(served, **body, return_token_ids=True))["choices"][0]
    text, logprobs, offsets, token_ids = "", [], [], []
    answer = await served.http.post("/v1/completions", json={**body, "stream": True, "return_token_ids": True})
    for line in answer.text.split("\n\n"):
        if line.startswith("data: {"):
            [choice] = orjson.loads(line[6:])["choices"]
            text += choice["text"]
            token_ids += choice.get("token_ids") or []
            if choice["logprobs"]:
                logprobs += choice["logprobs"]["token_logprobs"]
                offsets += choice["logprobs"]["text_offset"]
    assert answer.text.endswith("data: [DONE]\n\n")
    assert (text, offsets, token_ids) == (whole["text"], whole["logprobs"]["text_offset"], whole["token_ids"])
    assert logprobs[0] is None and logprobs[1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs must be an integer between 0 and 20"),
        ({"prompt": "x", "prompt_logprobs": 21}, "between 0 and 20"),
        ({"prompt": "x", "prompt_logprobs": True}, "an integer"),
        ({"prompt": "x", "prompt_logprobs": 0, "stream": True}, "leave out stream"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "echo": True, "max_tokens": False}, "max_tokens"),
        ({"prompt": "x", "return_token_ids": 1}, "return_token_ids"),
        ({"prompt": [5] * 4000, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1}, "fewer alternatives"),
    ],
)
async def test_what_is_wrong_is_said(serve, body, words) -> None:
    async with serve(models=(CHAT,)) as served:
        answer = await served.http.post("/v1/completions", json={"model": CHAT, **body})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
