"""`/tokenize`, `/detokenize` and what `lm-eval`'s remote tokenizer asks, on the real tokenizers."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from serve_app.catalog.load import PROJECT_ROOT

CHAT, RERANK = "@cf/pico/pico-instruct", "@cf/pico/pico-reranker"
ASK = [{"role": "user", "content": "What does math.sqrt do?"}]


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(PROJECT_ROOT / "checkpoints" / "pico-instruct")


@pytest.fixture
async def http(serve):
    async with serve(models=(CHAT, RERANK)) as served:
        yield served.http


async def test_there_and_back(http, reference) -> None:
    text = "import os\nprint('\u00e4 \U0001f600')\n"
    answer = (await http.post("/tokenize", json={"model": CHAT, "prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == reference(text)["input_ids"] and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096 and len(answer["token_strs"]) == answer["count"]
    back = (await http.post("/detokenize", json={"model": CHAT, "tokens": answer["tokens"]})).json()
    assert back == {"prompt": reference.bos_token + text}


async def test_conversations(http, reference) -> None:
    for add in (True, False):
        body = {"messages": ASK, "add_generation_prompt": add}
        expected = reference.apply_chat_template(ASK, add_generation_prompt=add, tokenize=True, return_dict=False)
        assert (await http.post("/tokenize", json=body)).json()["tokens"] == expected
    begun = [*ASK, {"role": "assistant", "content": "It"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    expected = reference.apply_chat_template(begun, continue_final_message=True, tokenize=True, return_dict=False)
    assert (await http.post("/tokenize", json=body)).json()["tokens"] == expected


async def test_encoders_have_tokens_too(http) -> None:
    with_marks = (await http.post("/tokenize", json={"model": RERANK, "prompt": "close a file"})).json()
    without = await http.post(
        "/tokenize", json={"model": RERANK, "prompt": "close a file", "add_special_tokens": False}
    )
    assert with_marks["tokens"][1:-1] == without.json()["tokens"] and with_marks["max_model_len"] == 512


async def test_what_a_remote_tokenizer_asks(http, reference) -> None:
    """Nobody names a model, and a control token's name is one token."""
    info = (await http.get("/tokenizer_info")).json()
    assert info["eos_token"] == reference.eos_token and info["chat_template"] == reference.chat_template
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert (await http.post("/tokenize", json=body)).json()["tokens"] == [reference.eos_token_id]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "Send prompt"),
        ("/tokenize", {"prompt": 5}, "prompt must be a string"),
        ("/tokenize", {"prompt": "x", "messages": ASK}, "exclude each other"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"messages": ASK, "add_special_tokens": True}, "writes its own"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"messages": ASK, "chat_template": "{{ x }}"}, "chat_template"),
        ("/tokenize", {"messages": ASK, "model": RERANK}, "no chat template"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": "x"}, "tokens must be an array"),
        ("/detokenize", {"tokens": [-1]}, "out of vocabulary"),
        ("/detokenize", {"tokens": [10**9]}, "out of vocabulary"),
        ("/detokenize", {"tokens": [1.5]}, "integers"),
    ],
)
async def test_what_is_wrong_is_said(http, path, body, words) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
