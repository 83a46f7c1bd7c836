"""What real clients send, and what we make of it."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.content import content_text
from serve_app.api.multi_vector import Reading
from serve_app.api.openai import read as openai
from serve_app.api.types import ModelLimits, Usage
from serve_app.api.workers_ai import read as workers_ai
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_embeddings.write import render_embed
from serve_app.tasks.text_generation.read import parse_generate
from tests.api.clients import MODEL, client, cloudflare, sent_by

USAGE = Usage(prompt_tokens=21, completion_tokens=3, cached_tokens=16, micro_neurons=250_000)


def test_cloudflare_prompt_and_messages():
    body = sent_by(
        lambda h: cloudflare(h).ai.run(MODEL, account_id="local", prompt="hi", max_tokens=7, raw=True)
    ).content
    request = parse_generate(body, MODEL)
    assert (request.prompt, request.raw, request.sampling.max_tokens, request.max_tokens_given) == (
        "hi",
        True,
        7,
        True,
    )

    def chat(h: httpx.Client) -> None:
        cloudflare(h).ai.run(
            MODEL,
            account_id="local",
            prompt="",
            extra_body={"messages": [{"role": "user", "content": "hi"}], "options": {"rejectIfBusy": True}},
        )

    request = parse_generate(sent_by(chat).content, MODEL, ModelLimits(default_max_tokens=99))
    assert request.messages == [{"role": "user", "content": "hi"}] and request.prompt is None
    assert request.reject_if_busy and request.sampling.max_tokens == 99 and not request.max_tokens_given
    assert request.sampling.temperature == 0.6


def test_cloudflare_embeddings_and_rerank():
    body = sent_by(lambda h: cloudflare(h).ai.run(MODEL, account_id="local", text=["a", "b"])).content
    assert parse_embed(body, MODEL).texts == ["a", "b"]
    extra = {"query": "q", "contexts": [{"text": "a"}, {"text": "b"}], "top_k": 1}
    body = sent_by(lambda h: cloudflare(h).ai.run(MODEL, account_id="local", text="", extra_body=extra)).content
    request = parse_rerank(body, MODEL)
    assert (request.query, request.contexts, request.top_k) == ("q", ["a", "b"], 1)


def test_openai_chat_with_everything():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"$schema": "x", "type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]

    def send(h: httpx.Client) -> None:
        client(h).chat.completions.create(
            model=MODEL, messages=messages, tools=[tool], tool_choice="auto", n=2, seed=5, stop=["x", "y"],
            user="me", temperature=0, top_p=0.5, frequency_penalty=1, presence_penalty=-1,
            logit_bias={"7": -100}, logprobs=True,
            top_logprobs=2, max_completion_tokens=11, stream=True, stream_options={"include_usage": True},
            extra_body={
                "options": {"rejectIfBusy": True}, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
            },
        )  # fmt: skip

    request = openai.parse_chat(sent_by(send).content, ModelLimits(vocab_size=10))
    assert [message["role"] for message in request.messages or []] == ["system", "user", "assistant", "tool"]
    assert content_text((request.messages or [])[1]["content"]) == "a\nb"
    assert (request.n, request.stop, request.stream, request.include_usage) == (2, ("x", "y"), True, True)
    assert request.tools == [tool] and request.reject_if_busy
    sampling = request.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0, 0.5, 3)
    assert (sampling.max_tokens, sampling.logit_bias, sampling.logprobs) == (11, {7: -100.0}, 2)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1, -1)


def test_nulls_and_unknown_fields_ask_nothing():
    names = (
        "stop",
        "tools",
        "seed",
        "temperature",
        "logit_bias",
        "max_tokens",
        "stream",
        "response_format",
        "lora",
        "n",
    )
    body = {
        "messages": [{"role": "user", "content": "x", "extra": 1}],
        **dict.fromkeys(names),
        "tool_choice": None,
        "whim": 1,
    }
    request = parse_generate({**body, "tools": []}, MODEL)
    assert request.tools is None and request.stop == () and request.n == 1 and not request.stream
    assert openai.parse_chat({"model": MODEL, **body}).sampling.temperature == 0.6


def test_flat_tools_raw_as_text_and_clipped_top_p():
    flat = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    request = parse_generate({"prompt": "x", "tools": [flat], "raw": "true", "top_p": 2, "max_tokens": 5.0}, MODEL)
    assert request.tools == [{"type": "function", "function": flat}]
    assert request.raw and request.sampling.top_p == 1 and request.sampling.max_tokens == 5


def test_native_tool_history_without_ids():
    calls = [{"name": "f", "arguments": {"a": 1}}]
    body = {
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "2", "name": "f"},
        ]
    }
    messages = parse_generate(body, MODEL).messages or []
    assert messages[0]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]


def test_seeds_differ_unless_given():
    seeds = {parse_generate({"prompt": "x"}, MODEL).sampling.seed for _ in range(8)}
    assert len(seeds) > 1


def test_generic_run_form():
    model, inputs = workers_ai.parse_run_target(
        {"model": MODEL, "input": {"prompt": "x"}, "options": {"rejectIfBusy": True}}
    )
    assert model == MODEL and parse_generate(inputs, model).reject_if_busy


def test_completions_prompts():
    def send(h: httpx.Client) -> None:
        client(h).completions.create(model=MODEL, prompt=["a", "b"], n=2, echo=True, max_tokens=4)

    requests = openai.parse_completions(sent_by(send).content)
    assert [(r.prompt, r.raw, r.n, r.echo) for r in requests] == [("a", True, 2, True), ("b", True, 2, True)]
    ids = openai.parse_completions({"model": MODEL, "prompt": [[1, 2], [3]], "logprobs": 3})
    assert [r.prompt_ids for r in ids] == [(1, 2), (3,)] and ids[0].sampling.logprobs == 3


def test_bge_m3_forms():
    contexts = [{"text": "a"}, {"text": "b"}]
    only = parse_embed({"contexts": contexts, "truncate_inputs": True}, MODEL)
    assert (only.form, only.texts) == ("contexts", ["a", "b"])
    scored = parse_embed({"query": "q", "contexts": contexts}, MODEL)
    vectors = np.array([[1, 0], [0, 2], [3, 0]], dtype=np.float32)
    answer = render_embed(scored, Reading(vectors), USAGE)["result"]["response"]
    assert answer == [{"id": 1, "score": 1.0}, {"id": 0, "score": 0.0}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_grammar": ""}, "guided_grammar is empty"),
        ({"guided_regex": ""}, "guided_regex is empty"),
        ({"guided_json": ""}, "guided_json"),
        ({"structured_outputs": {}}, "holds no constraint"),
        ({"structured_outputs": {"regex": None}}, "holds no constraint"),
        ({"structured_outputs": {"regex": ""}}, "is empty"),
        ({"structured_outputs": {"json_object": False}}, "json_object"),
        ({"regex": ""}, "regex is empty"),
        ({"grammar": "", "ebnf": None}, "grammar is empty"),
        ({"regex": "a", "json_schema": {"type": "object"}}, "exclude each other"),
        ({"json_schema": "{"}, "json_schema"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"suffix": 0}, "suffix"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"min_tokens": 5, "max_tokens": 4}, "more than max_tokens"),
        ({"continue_final_message": True}, "needs an assistant message"),
        ({"continue_final_message": 1}, "true or false"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_what_would_change_the_answer_is_never_ignored(fields, words):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    for parse in (openai.parse_chat, lambda body: parse_generate(body, MODEL)):
        with pytest.raises(InvalidInput, match=words):
            parse(asked)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("regex", "a+", "regex"), ("ebnf", 'root ::= "a"', "grammar"), ("grammar", 'root ::= "a"', "grammar"),
     ("json_schema", {"type": "object"}, "json_schema"), ("json_schema", '{"type": "object"}', "json_schema")],
)  # fmt: skip
def test_constraints_by_other_servers_names(name, value, kind):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], name: value}
    for found in (openai.parse_chat(body), openai.parse_completions({"model": MODEL, "prompt": "x", name: value})[0]):
        assert found.answer_format is not None and found.answer_format.kind == kind


def test_up_to_128_answers_and_the_least_number_of_tokens():
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    found = openai.parse_chat({**asked, "n": 128, "min_tokens": 7})
    assert found.n == 128 and found.sampling.min_tokens == 7
    with pytest.raises(InvalidInput, match="between 1 and 128"):
        openai.parse_chat({**asked, "n": 129})


def test_a_turn_that_goes_on():
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]}
    found = openai.parse_chat({**asked, "continue_final_message": True, "add_generation_prompt": False})
    assert found.template_kwargs == {"add_generation_prompt": False, "continue_final_message": True}
    assert openai.parse_chat({**asked, "add_generation_prompt": False}).template_kwargs == {
        "add_generation_prompt": False
    }
    assert openai.parse_chat({**asked, "add_generation_prompt": True}).template_kwargs == {}


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_options_of_streams_need_a_stream(options):
    asked = {"model": MODEL, "stream_options": options}
    with pytest.raises(InvalidInput, match="stream_options needs stream"):
        openai.parse_chat({**asked, "messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(InvalidInput, match="stream_options needs stream"):
        openai.parse_completions({**asked, "prompt": "x", "stream": False})


def test_logprobs_of_prompts_are_refused_where_they_are_not_told_even_none_of_them():
    for body in ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}):
        with pytest.raises(InvalidInput, match="prompt_logprobs"):
            parse_generate({**body, "prompt_logprobs": 0}, MODEL)
