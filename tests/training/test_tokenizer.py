"""The shipped tokenizer and chat template: round trips, control tokens, every kind of message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from training import tokenizer
from training.template import CONTROL, TOOL_TAGS, render

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}


@pytest.fixture(scope="module")
def tok():
    return AutoTokenizer.from_pretrained(CHECKPOINTS / "pico-instruct")


RAW = tokenizer.load(CHECKPOINTS / "pico-instruct")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80))
def test_any_text_round_trips(text):
    assert RAW.decode(RAW.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_tool_tags_are_not(tok):
    added = {
        t["content"]: t
        for t in json.loads((CHECKPOINTS / "pico-instruct" / "tokenizer.json").read_text())["added_tokens"]
    }
    assert [added[t]["id"] for t in CONTROL] == list(range(len(CONTROL)))
    assert all(added[t]["special"] for t in CONTROL)
    # A tool call must survive skip_special_tokens, or the server could not parse it.
    assert all(not added[t]["special"] for t in TOOL_TAGS)
    assert (tok.pad_token_id, tok.bos_token_id, tok.eos_token_id) == (0, 1, 2)
    assert len(tok) == tokenizer.VOCAB


def test_a_plain_prompt_gets_one_begin_token(tok):
    assert tok("hi")["input_ids"][0] == tok.bos_token_id
    assert tok("hi")["input_ids"].count(tok.bos_token_id) == 1


def test_template_renders_a_whole_conversation(tok):
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Zürich?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks"},
    ]
    text = tok.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|begin|><|system|>Be brief.\nTools:\n" + json.dumps(TOOLS[0]["function"]) + "<|end|>"
        "<|user|>Weather in Zürich?<|end|>"
        '<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call><|end|>'
        "<|tool|>sunny<|end|><|assistant|>It is sunny.<|end|><|user|>Thanks<|end|><|assistant|>"
    )
    assert text == render(messages, TOOLS, ask=True)


def test_arguments_may_be_a_json_string(tok):
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    text = tok.apply_chat_template([{"role": "assistant", "content": None, "tool_calls": [call]}], tokenize=False)
    assert text == '<|begin|><|assistant|><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|end|>'


def test_white_space_of_messages_is_kept(tok):
    text = tok.apply_chat_template([{"role": "user", "content": "  a\n\n b \n"}], tokenize=False)
    assert text == "<|begin|><|user|>  a\n\n b \n<|end|>"


@pytest.mark.parametrize("other", ["pico-draft"])
def test_the_draft_shares_the_tokenizer(other):
    mine, theirs = ((CHECKPOINTS / n / "tokenizer.json").read_bytes() for n in ("pico-instruct", other))
    assert mine == theirs


def test_reranker_pairs_in_berts_layout():
    tok = AutoTokenizer.from_pretrained(CHECKPOINTS / "pico-reranker")
    out = tok("what is chain", "it chains iterables")
    tokens = tok.convert_ids_to_tokens(out["input_ids"])
    assert tokens[0] == "[CLS]" and tokens.count("[SEP]") == 2 and tokens[-1] == "[SEP]"
    cut = tokens.index("[SEP]") + 1
    assert out["token_type_ids"] == [0] * cut + [1] * (len(tokens) - cut)
    assert "[UNK]" not in tokens
